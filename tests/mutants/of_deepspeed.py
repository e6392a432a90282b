"""Mutants of DeepSpeed: each one undoes the fix of an upstream bug."""

from __future__ import annotations

from .mutation import Edit, Mutant

BF16 = "deepspeed/runtime/bf16_optimizer.py"
ENGINE = "deepspeed/runtime/engine.py"
SCHEDULES = "deepspeed/runtime/lr_schedules.py"
TO_UNIVERSAL = "deepspeed/checkpoint/ds_to_universal.py"
UNFUSED = "deepspeed/runtime/fp16/unfused_optimizer.py"
UTILS = "deepspeed/runtime/utils.py"
ULYSSES = "deepspeed/runtime/sequence_parallel/ulysses_sp.py"
ZERO12 = "deepspeed/runtime/zero/stage_1_and_2.py"
ZERO3 = "deepspeed/runtime/zero/stage3.py"
ZERO3_PARTS = "deepspeed/runtime/zero/partition_parameters.py"
ZERO3_HOOKS = "deepspeed/runtime/zero/parameter_offload.py"

ISSUES = "https://github.com/deepspeedai/DeepSpeed/issues/"
PULLS = "https://github.com/deepspeedai/DeepSpeed/pull/"

MUTANTS = (
    Mutant(
        "ds-4688-short-warmup",
        (PULLS + "4688",),
        "WarmupCosineLR divides by the logarithm of one step: ZeroDivisionError",
        (
            Edit(
                SCHEDULES,
                "        self.inverse_log_warm_up = 1.0 / math.log(self.warmup_num_steps)\n\n        if self.total",
                "        self.inverse_log_warm_up = 1.0 / math.log(warmup_num_steps)\n\n        if self.total",
            ),
        ),
    ),
    Mutant(
        "ds-5150-clip",
        (PULLS + "5150",),
        "clipping takes the larger factor: large gradients stay, small ones grow",
        (Edit(UTILS, "torch.min(tmp_tensor, clip_coef)", "torch.max(tmp_tensor, clip_coef)"),),
    ),
    Mutant(
        "ds-5170-bf16-allreduce",
        (PULLS + "5170",),
        "bf16 gradients are reduced, but the optimizer reads the fp32 ones",
        (Edit(ENGINE, 'if hasattr(self.optimizer, "get_grads_for_reduction"):', "if False:"),),
    ),
    Mutant(
        "ds-7473-ulysses-loss",
        (ISSUES + "7473",),
        "Ulysses: each part of a sequence shifts its own labels, so that no part learns to predict the next one's first token",
        (
            Edit(
                ULYSSES,
                '            batch["shift_labels"] = labels[..., 1:].contiguous()\n',
                '            batch["shift_labels"] = labels[..., 1:].contiguous()\n'
                '            batch["shift_labels"][..., chunk_len - 1 :: chunk_len] = -100\n',
            ),
        ),
    ),
    Mutant(
        "ds-8491-ulysses-gradients",
        (ISSUES + "8491", ISSUES + "5248"),
        "Ulysses under ZeRO-2: gradients are divided by the ranks of a sequence too, whose sum they are",
        (
            Edit(
                ZERO12,
                "tensor.div_(dist.get_world_size(group=self.dp_process_group) / float(self.sequence_parallel_size))",
                "tensor.div_(dist.get_world_size(group=self.dp_process_group))",
            ),
        ),
    ),
    Mutant(
        "ds-7566-init-of-parents",
        (PULLS + "7566",),
        "after zero.Init a class without an __init__ of its own has its parent's: parts of the model are missing",
        (
            Edit(
                ZERO3_PARTS,
                "                if '__init__' in cls.__dict__ and hasattr(cls, '_old_init'):\n",
                "                if hasattr(cls, '_old_init'):\n",
            ),
        ),
    ),
    Mutant(
        "ds-7580-overflow-z1",
        (PULLS + "7580", ISSUES + "7568"),
        "ZeRO-1: only the overflowing rank skips the fp16 step; the others wait for it",
        (
            Edit(
                ZERO12,
                "        dist.all_reduce(overflow_gpu, op=dist.ReduceOp.MAX, group=self.dp_process_group)\n\n"
                "        # Since each model parallel",
                "        if partition_gradients:\n"
                "            dist.all_reduce(overflow_gpu, op=dist.ReduceOp.MAX, group=self.dp_process_group)\n\n"
                "        # Since each model parallel",
            ),
        ),
    ),
    Mutant(
        "ds-7586-z0-load-path",
        (PULLS + "7586", ISSUES + "7571"),
        "stage 0 in bf16 loads as ZeRO: an exception on resume",
        (
            Edit(
                ENGINE,
                "load_zero_checkpoint = load_path is not None and self.zero_optimization()",
                "load_zero_checkpoint = load_path is not None and (self.zero_optimization() or self.bfloat16_enabled())",
            ),
        ),
    ),
    Mutant(
        "ds-7601-local-rank",
        (PULLS + "7601",),
        "a universal checkpoint is loaded by ZeRO-3 by the number of the rank on its node: wrong parts on several nodes",
        (
            Edit(
                ZERO3,
                "        rank = dist.get_rank(group=partition_group)\n\n        # Load tensors from files",
                "        rank = dist.get_local_rank()\n\n        # Load tensors from files",
            ),
        ),
    ),
    Mutant(
        "ds-7659-scalar-state",
        (PULLS + "7659", ISSUES + "7650"),
        "an elastic checkpoint slices state without dimensions, as the step of AdamW: IndexError on save",
        (Edit(ZERO12, "if torch.is_tensor(value) and value.dim() > 0:", "if torch.is_tensor(value):"),),
    ),
    Mutant(
        "ds-7786-z0-bf16-ckpt",
        (PULLS + "7786",),
        "stage 0 in bf16: the optimizer is neither saved nor loaded",
        (
            Edit(
                ENGINE,
                "            has_zero_optimizer_state = self.zero_optimization()\n",
                "            has_zero_optimizer_state = self.zero_optimization() or self.bfloat16_enabled()\n",
            ),
            Edit(
                ENGINE,
                "        zero_optimizer_state = self.zero_optimization()\n\n        save_frozen_param",
                "        zero_optimizer_state = self.zero_optimization() or self.bfloat16_enabled()\n\n"
                "        save_frozen_param",
            ),
        ),
    ),
    Mutant(
        "ds-7763-destroyed-engine",
        (PULLS + "7763", ISSUES + "7752"),
        "an engine in bfloat16 without an optimizer cannot be destroyed: IndexError",
        (
            Edit(
                BF16,
                "        if not self.using_real_optimizer:\n            return\n        for i, _ in enumerate",
                "        for i, _ in enumerate",
            ),
        ),
    ),
    Mutant(
        "ds-7790-sums-without-zero",
        (PULLS + "7790",),
        "stage 0 takes the optimizer of ZeRO-1 for float32 sums of bf16 gradients, instead of a refusal",
        (
            Edit(
                ENGINE,
                "            return FP16 if model_dtype == torch.float16 else DDP_BFLOAT16\n        else:\n",
                "            return FP16 if model_dtype == torch.float16 else DDP_BFLOAT16\n"
                "        elif model_dtype == torch.bfloat16 and grad_accum_dtype == torch.float32:\n"
                "            return BFLOAT16\n        else:\n",
            ),
        ),
    ),
    Mutant(
        "ds-7829-tiled-gradients",
        (PULLS + "7829",),
        "ZeRO-2 takes each part of a gradient of a tiled computation for a whole one: AssertionError in backward",
        (
            Edit(
                ZERO12,
                """\
        if not getattr(param, "ds_grad_is_ready", True):
            return

        self._maybe_reduce_autoep_folding_tp_gradient(param, grad_reduc)
""",
                "        self._maybe_reduce_autoep_folding_tp_gradient(param, grad_reduc)\n",
            ),
            Edit(
                ZERO12,
                """\
        bucket.grads.append(grad_reduc)
        bucket.params.append((i, param.param_idx_in_group, param_id))
""",
                """\
        if getattr(param, "ds_grad_is_ready", True):
            bucket.grads.append(grad_reduc)
            bucket.params.append((i, param.param_idx_in_group, param_id))
""",
            ),
        ),
    ),
    Mutant(
        "ds-7839-z0-zero-grad",
        (PULLS + "7839", ISSUES + "7837"),
        "stage 0 in bf16: gradients are not cleared after a step",
        (
            Edit(
                ENGINE,
                """\
            if hasattr(self.optimizer, "zero_grad"):
                self.optimizer.zero_grad()
            else:
                self.zero_grad()
""",
                """\
            if self.zero_optimization() and hasattr(self.optimizer, "zero_grad"):
                self.optimizer.zero_grad()
""",
            ),
        ),
    ),
    Mutant(
        "ds-7969-first-rates",
        (PULLS + "7969",),
        "WarmupCosineLR gives the first of several param groups alone its first learning rate",
        (Edit(SCHEDULES, "            return [0.0 for _ in self.org_lrs]\n", "            return [0.0]\n"),),
    ),
    Mutant(
        "ds-7990-config-of-text",
        (PULLS + "7990",),
        "Ulysses looks for the number of heads in the config of a whole model, whose text has one of its own",
        (
            Edit(
                ULYSSES,
                "        arch_cfg = hf_model_config.get_text_config()\n",
                "        arch_cfg = hf_model_config\n",
            ),
        ),
    ),
    Mutant(
        "ds-8009-attached-module",
        (PULLS + "8009", ISSUES + "6961"),
        "ZeRO-3: AttributeError in the forward of a model to which a module was attached after initialize",
        (
            Edit(ENGINE, "                ensure_zero_ordered_dict(module)\n", ""),
            Edit(
                ENGINE,
                "                if isinstance(module._parameters, ZeROOrderedDict):\n"
                "                    module._parameters._in_forward = False\n",
                "                module._parameters._in_forward = False\n",
            ),
        ),
    ),
    Mutant(
        "ds-8029-frozen-masters",
        (PULLS + "8029", PULLS + "7515"),
        "fp32 masters of frozen parameters: a LoRA run holds its base twice more",
        (
            Edit(
                UNFUSED,
                "[p for p in param_group['params'] if is_optimized_parameter(p)]",
                "list(param_group['params'])",
            ),
        ),
    ),
    Mutant(
        "ds-8158-fetch-stride",
        (PULLS + "8158",),
        "ZeRO-3 adds memory that nobody wrote to parameters that are fetched by all_reduce",
        (
            Edit(
                ZERO3_PARTS,
                "                    start_param += param.ds_numel_aligned\n\n                handle = dist.all_reduce",
                "                    start_param += param.ds_numel\n\n                handle = dist.all_reduce",
            ),
        ),
    ),
    Mutant(
        "ds-8113-two-dtypes",
        (PULLS + "8113",),
        "ZeRO-3 under autocast: an assertion where parameters of two dtypes are gathered together",
        (
            Edit(
                ZERO3_PARTS,
                """\
            comm_dtypes = [get_allgather_dtype(p, p.ds_tensor) for p in params]
            assert all(
                dtype == allgather_dtype
                for dtype in comm_dtypes), ("all params in a coalesced bucket must have the same communication dtype; "
                                            f"expected {allgather_dtype}, got {comm_dtypes}")
""",
                """\
            dtype = params[0].dtype
            assert all(p.dtype == dtype for p in params), "all params must have the same dtype"
""",
            ),
        ),
    ),
    Mutant(
        "ds-8144-delegated-hooks",
        (PULLS + "8144", ISSUES + "7615"),
        "ZeRO-3: a module that hands attributes on gets the hooks of its child: AttributeError in backward",
        (
            Edit(ZERO3_HOOKS, 'if "pre_bwd_fn" not in module.__dict__:', 'if not hasattr(module, "pre_bwd_fn"):'),
            Edit(
                ZERO3_HOOKS,
                'if "applied_pre_backward_ref_cnt" not in ctx.module.__dict__:',
                'if not hasattr(ctx.module, "applied_pre_backward_ref_cnt"):',
            ),
            Edit(ZERO3_HOOKS, 'if "post_bwd_fn" not in module.__dict__:', 'if not hasattr(module, "post_bwd_fn"):'),
        ),
    ),
    Mutant(
        "ds-5730-spelling",
        (PULLS + "5730",),
        "the command that converts checkpoints does not know the option --inject_missing_state, which loading asks for",
        (Edit(TO_UNIVERSAL, "'--inject_missing_state'", "'--inject-missing-state'"),),
    ),
    Mutant(
        "ds-8171-rates-of-groups",
        (PULLS + "8171",),
        "WarmupLR warms all param groups up to the learning rate of the first one",
        (
            Edit(
                SCHEDULES,
                "            warmup_max_lr = [group['lr'] for group in self.optimizer.param_groups]\n",
                "            warmup_max_lr = [group['lr'] for group in self.optimizer.param_groups][0]\n",
            ),
        ),
    ),
)
