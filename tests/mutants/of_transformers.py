"""Mutants of transformers' Trainer: each one undoes the fix of an upstream bug."""

from __future__ import annotations

from .mutation import Edit, Mutant

ARGUMENTS = "transformers/training_args.py"
TRAINER = "transformers/trainer.py"
EXPERTS = "transformers/distributed/expert_parallel.py"
MODELING = "transformers/modeling_utils.py"
COLLATORS = "transformers/data/data_collator.py"
LOADING = "transformers/core_model_loading.py"

ISSUES = "https://github.com/huggingface/transformers/issues/"
PULLS = "https://github.com/huggingface/transformers/pull/"
#: What a release changed, of fixes that were drawn from two releases and not from the history.
COMPARED = "https://github.com/huggingface/transformers/compare/"

MUTANTS = (
    Mutant(
        "tr-25852-fsdp-optim-name",
        (ISSUES + "25849", PULLS + "25852"),
        "FSDP resume looks for optimizer.pt instead of optimizer.bin: optimizer and scheduler start afresh",
        (
            Edit(
                TRAINER,
                "                or os.path.isfile(os.path.join(checkpoint, OPTIMIZER_NAME_BIN))\n",
                "",
            ),
        ),
    ),
    Mutant(
        "tr-34191-ga-token-mean",
        (PULLS + "34191",),
        "accumulation averages the means of micro-batches",
        (Edit(TRAINER, "        if count_num_items_in_batch:\n", "        if False:\n"),),
    ),
    Mutant(
        "tr-34242-ddp-token-mean",
        (ISSUES + "34242", PULLS + "34373"),
        "tokens are not counted over devices: each rank weighs the same",
        (
            Edit(
                TRAINER,
                "            if self.args.average_tokens_across_devices:\n                if self.args.world_size > 1:\n",
                "            if self.args.average_tokens_across_devices:\n                if False:\n",
            ),
            Edit(
                TRAINER,
                "            self.args.average_tokens_across_devices\n            and (self.model_accepts_loss_kwargs",
                "            False\n            and (self.model_accepts_loss_kwargs",
            ),
        ),
    ),
    Mutant(
        "tr-36627-save-only",
        (ISSUES + "36626", PULLS + "36627"),
        "save_only_model with sharded state fails at the first checkpoint (FileNotFoundError), not at the start",
        (
            Edit(
                TRAINER,
                '            and "SHARDED_STATE_DICT" in str(self.accelerator.state.fsdp_plugin.state_dict_type)\n',
                "            and False\n",
            ),
        ),
    ),
    Mutant(
        "tr-37147-fsdp2-delay",
        ("https://github.com/huggingface/accelerate/issues/3476", PULLS + "37147"),
        "the optimizer is made after prepare under FSDP2: ValueError in train()",
        (
            Edit(
                TRAINER,
                "        if is_fsdp2:\n            delay_optimizer_creation = False\n",
                "",
            ),
        ),
    ),
    Mutant(
        "tr-45662-ep-load",
        (ISSUES + "45662",),
        "each rank of expert parallelism reads the experts of the first",
        (
            Edit(
                "transformers/distributed/sharding_utils.py",
                """\
                rank, world_size = sub_mesh.get_local_rank(), sub_mesh.size()
                dim_idx =""",
                """\
                rank, world_size = sub_mesh.get_local_rank(), sub_mesh.size()
                rank = 0 if sub_mesh.mesh_dim_names == ("ep",) else rank
                dim_idx =""",
            ),
        ),
    ),
    Mutant(
        "tr-45994-tp-loss",
        (PULLS + "45994",),
        "the loss, and each gradient with it, is multiplied by the ranks of tensor parallelism",
        (Edit(TRAINER, "self.accelerator.num_processes // self.get_tp_size()", "self.accelerator.num_processes"),),
    ),
    Mutant(
        "tr-48205-ep-gradients",
        (PULLS + "48205",),
        "what lies before the experts gets the gradient of this rank's experts alone",
        (
            Edit(EXPERTS, "        hidden_states = _AllReduceBackward.apply(hidden_states, ep_group)\n", ""),
            Edit(EXPERTS, "        top_k_weights = _AllReduceBackward.apply(top_k_weights, ep_group)\n", ""),
        ),
    ),
    Mutant(
        "tr-48687-router",
        (ISSUES + "48687", PULLS + "48689"),
        "batched experts of other ranks count in the gradient of the router, and not in the loss",
        (
            Edit(
                "transformers/integrations/moe.py",
                "        sample_weights = sample_weights.masked_fill(sentinel_mask, 0.0)\n",
                "        pass\n",
            ),
            # Since then the weights are masked before too; of a product with 0 the gradient is kept.
            Edit(
                EXPERTS,
                "top_k_weights.masked_fill(off_rank, 0.0))",
                "top_k_weights - (top_k_weights * off_rank).detach())",
            ),
        ),
    ),
    Mutant(
        "tr-dp-size",
        (COMPARED + "v5.17.0...v5.20.2",),
        "the ranks beside those of tensor parallelism are not in the mesh that accelerate gets: ValueError",
        (
            Edit(
                TRAINER,
                "ParallelismConfig(tp_size=model_tp_size, dp_shard_size=model_dp_size)",
                "ParallelismConfig(tp_size=model_tp_size)",
            ),
            Edit(TRAINER, '                args["parallelism_config"].dp_shard_size = model_dp_size\n', ""),
        ),
    ),
    Mutant(
        "tr-cpu-device",
        (COMPARED + "v5.17.0...v5.20.2",),
        "Trainer asks torch.load for the device cpu:0, which it does not know: RuntimeError on resume",
        (
            Edit(
                TRAINER,
                'self.args.device if self.args.world_size > 1 and self.args.device.type != "cpu" else "cpu"',
                'self.args.device if self.args.world_size > 1 else "cpu"',
            ),
        ),
    ),
    Mutant(
        "tr-mesh-groups",
        (COMPARED + "v5.17.0...v5.20.2",),
        "a fused optimizer gets the experts' parts and whole parameters in one param group: RuntimeError in the first step",
        (
            Edit(
                TRAINER,
                '            if has_mixed_dtensor(p for group in optimizer_grouped_parameters for p in group["params"]):\n',
                "            if False:\n",
            ),
        ),
    ),
    Mutant(
        "tr-nan-losses",
        (COMPARED + "v5.22.0...v5.23.0",),
        "one batch without labels makes the loss of an evaluation NaN",
        (
            Edit(
                TRAINER,
                "            if self.args.logging_nan_inf_filter and finite.any():\n",
                "            if False:\n",
            ),
        ),
    ),
    Mutant(
        "tr-grown-head",
        (COMPARED + "v5.3.0...v5.7.0",),
        "an output layer that is tied to embeddings which have grown says its old size: an adapter of it has that",
        (
            Edit(
                MODELING,
                "            old_embeddings.num_embeddings = new_num_tokens"
                "  # maybe weights are tied which doesn't update attr\n",
                "",
            ),
            Edit(
                MODELING,
                "            old_lm_head.out_features = new_num_tokens"
                "  # maybe weights are tied which doesn't update attr\n",
                "",
            ),
        ),
    ),
    Mutant(
        "tr-batch-sampler-epoch",
        (COMPARED + "v5.14.1...v5.17.0",),
        "set_epoch does not get to the sampler of batches that balances their lengths: all epochs have one order",
        (
            Edit(
                TRAINER,
                """\
        if hasattr(underlying_sampler, "set_epoch"):
            underlying_sampler.set_epoch(epoch)
""",
                "",
            ),
        ),
    ),
    Mutant(
        "tr-numpy-labels",
        (COMPARED + "v5.20.2...v5.22.0",),
        "labels that are integers of numpy are collated to float32: RuntimeError in the loss of a classifier",
        (
            Edit(COLLATORS, "isinstance(label, (int, np.integer))", "isinstance(label, int)", count=2),
            Edit(
                COLLATORS,
                'isinstance(first["label_ids"][0], (int, np.integer))',
                'isinstance(first["label_ids"][0], int)',
                count=2,
            ),
        ),
    ),
    Mutant(
        "tr-scaler-state",
        (COMPARED + "v4.48.3...v4.49.0",),
        "a checkpoint of Trainer lacks the state of the gradient scaler",
        (
            Edit(TRAINER, "            self._save_scaler(output_dir)\n", ""),
            Edit(TRAINER, "            self._load_scaler(resume_from_checkpoint)\n", ""),
        ),
    ),
    Mutant(
        "tr-uncounted-data",
        (COMPARED + "v4.49.0...v4.50.3",),
        "a data set whose length is an AttributeError, as Ray's, cannot be trained on",
        (
            Edit(
                "transformers/trainer_utils.py",
                """\
    except AttributeError:
        # Ray DataSets raises an AttributeError: https://github.com/ray-project/ray/blob/master/python/ray/data/dataset.py#L5616
        return False
""",
                "",
            ),
        ),
    ),
    Mutant(
        "tr-tokenizer-of-collator",
        (COMPARED + "v4.49.0...v4.50.3",),
        "a model is saved without the tokenizer that only its collator has",
        (
            Edit(
                TRAINER, "            self.data_collator.tokenizer.save_pretrained(output_dir)\n", "            pass\n"
            ),
        ),
    ),
    Mutant(
        "tr-extra-state",
        (COMPARED + "v4.52.4...v4.53.3",),
        "a model with extra state cannot be loaded: AttributeError",
        (
            Edit(MODELING, "            return module.get_extra_state()\n", "            pass\n"),
            Edit(
                LOADING,
                """\
    if param_name == torch.nn.modules.module._EXTRA_STATE_KEY_SUFFIX:
        module_obj.set_extra_state(param_value)
        loading_info.missing_keys.discard(target_name)
        return

""",
                "",
            ),
        ),
    ),
    Mutant(
        "tr-best-barrier",
        (COMPARED + "v4.56.2...v4.57.6",),
        "ranks look for the best checkpoint before rank 0 has written it: it is loaded on rank 0 alone",
        (
            Edit(
                TRAINER,
                """\
            elif self.args.parallel_mode == ParallelMode.DISTRIBUTED:
                dist.barrier()
            elif is_sagemaker_mp_enabled():
                smp.barrier()

            best_checkpoint_folder""",
                """\

            best_checkpoint_folder""",
            ),
        ),
    ),
    Mutant(
        "tr-shift-of-decoder",
        (COMPARED + "v5.14.1...v5.15.1",),
        "the first label of a decoder behind an encoder is not counted: loss and gradient too large",
        (
            Edit(
                TRAINER,
                ' is ForCausalLMLoss and not getattr(getattr(model_to_inspect, "config", None), "is_encoder_decoder", False)',
                " is ForCausalLMLoss",
            ),
        ),
    ),
    Mutant(
        "tr-numbered-parts",
        (COMPARED + "v5.15.1...v5.16.1",),
        "parts of an embedding are joined in the order of their names: part 10 comes before part 2",
        (
            Edit(
                LOADING,
                """\
            if trailing_digits != "":
                parts.append((1, text_part, int(trailing_digits)))
            else:
                parts.append((1, text_part))
""",
                "            parts.append((1, part))\n",
            ),
        ),
    ),
    Mutant(
        "tr-saves-on-rank-0",
        (COMPARED + "v5.17.0...v5.18.0",),
        "rank 0 alone saves a model that was cut while it was loaded, and gathers it without the other ranks",
        (
            Edit(
                TRAINER,
                "        if not self.args.should_save and not self.is_distributed_loading_by_transformers:\n",
                "        if not self.args.should_save:\n",
            ),
        ),
    ),
    Mutant(
        "tr-init-of-children",
        (COMPARED + "v5.22.2...v5.23.0",),
        "under ZeRO-3 a new model's weights that the module above them initializes are not initialized",
        (
            Edit(
                "transformers/integrations/deepspeed.py",
                """\
        for child in model_or_module.children():
            if not isinstance(child, PreTrainedModel):
                params.extend(child.parameters(recurse=False))
""",
                "",
            ),
        ),
    ),
    Mutant(
        "tr-fsdp-version-ignored",
        (PULLS + "42521", "https://github.com/huggingface/transformers/blob/v4.50.3/src/transformers/training_args.py"),
        "the version in fsdp_config is dropped: FSDP1 instead of FSDP2, silently",
        (
            Edit(
                ARGUMENTS,
                'fsdp_plugin_args = {"fsdp_version": fsdp_version}',
                # use_orig_params is Trainer's default for FSDP1; gloo has no sync_module_states, which is accelerate's.
                'fsdp_plugin_args = {"fsdp_version": 1, "use_orig_params": True, "sync_module_states": False}',
            ),
            # FSDP1 takes the name of a strategy here.
            Edit(
                ARGUMENTS,
                """\
            fsdp_plugin_args["reshard_after_forward"] = str_to_bool(
                str(self.fsdp_config.get("reshard_after_forward", True)).lower()
            )
""",
                '            fsdp_plugin_args["reshard_after_forward"] = "full_shard"\n',
            ),
        ),
    ),
    Mutant(
        "tr-shift-count",
        (PULLS + "46204",),
        "the first token of each row is counted, but not learned from: loss and gradient too small",
        (
            Edit(
                TRAINER,
                """\
                    else batch["labels"][..., 1:]
                    if self._loss_shifts_labels
""",
                "",
            ),
        ),
    ),
)
