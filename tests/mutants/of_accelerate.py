"""Mutants of accelerate: each one undoes the fix of an upstream bug."""

from __future__ import annotations

from .mutation import Edit, Mutant

ACCELERATOR = "accelerate/accelerator.py"
DATA_LOADER = "accelerate/data_loader.py"
DEEPSPEED = "accelerate/utils/deepspeed.py"
FSDP = "accelerate/utils/fsdp_utils.py"
OPERATIONS = "accelerate/utils/operations.py"
SCHEDULER = "accelerate/scheduler.py"
STATE = "accelerate/state.py"
UNWRAP = "accelerate/utils/other.py"

ISSUES = "https://github.com/huggingface/accelerate/issues/"
PULLS = "https://github.com/huggingface/accelerate/pull/"

#: How the loading of a sharded optimizer asks for the state that DCP then fills.
TEMPLATE = """\
                if fsdp_plugin.fsdp_version == 2:
                    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

                    optim_state = get_optimizer_state_dict(model, optimizer, options=sd_options)
                else:
                    optim_state = FSDP.optim_state_dict(model, optimizer)
                optim_state = {"optimizer": optim_state}
"""

MUTANTS = (
    Mutant(
        "acc-999-sched-gas",
        (PULLS + "999",),
        "the scheduler steps on every micro-batch: the learning rate decays too fast",
        (
            Edit(
                SCHEDULER,
                "        if not self.gradient_state.sync_gradients:\n",
                "        if False:\n",
            ),
        ),
    ),
    Mutant(
        "acc-1755-fsdp1-optim-args",
        (PULLS + "1755",),
        "FSDP1: swapped arguments of optim_state_dict_to_load, an exception on resume",
        (
            Edit(
                FSDP,
                "FSDP.optim_state_dict_to_load(model=model, optim=optimizer, optim_state_dict=optim_state)",
                "FSDP.optim_state_dict_to_load(optim_state, model, optimizer)",
            ),
        ),
    ),
    Mutant(
        "acc-2674-fsdp1-upcast",
        (PULLS + "2674", ISSUES + "2624"),
        "a bf16-loaded model keeps bf16 masters under FSDP1, unlike DeepSpeed",
        (Edit(ACCELERATOR, 'if self.mixed_precision != "no":  # if mixed precision is set', "if False:"),),
    ),
    Mutant(
        "acc-2728-sampler-of-batches",
        (PULLS + "2728",),
        "a sampler that yields whole batches is taken for one of rows: the ranks do not share its batches out",
        (
            Edit(
                DATA_LOADER,
                "    sampler_is_batch_sampler = isinstance(dataloader.sampler, BatchSampler)\n    synchronized",
                "    sampler_is_batch_sampler = False\n    synchronized",
            ),
        ),
    ),
    Mutant(
        "acc-2755-threads",
        (PULLS + "2755",),
        "on CPU ranks accelerate replaces the number of threads that OMP_NUM_THREADS says",
        (
            Edit(
                STATE,
                'and get_int_from_env(["OMP_NUM_THREADS"], 0) == 0\n',
                'and get_int_from_env(["OMP_NUM_THREADS"], 0) > 0\n',
            ),
        ),
    ),
    Mutant(
        "acc-3114-negative-dim",
        (PULLS + "3114",),
        "pad_across_processes leaves tensors as they are if the dimension is counted from the end",
        (
            Edit(
                OPERATIONS,
                "        if dim >= len(tensor.shape) or dim < -len(tensor.shape):\n",
                "        if dim >= len(tensor.shape) or dim < 0:\n",
            ),
        ),
    ),
    Mutant(
        "acc-3146-zero3-save-model",
        (PULLS + "3146",),
        "ZeRO-3: save_model raises on every rank but the first",
        (
            Edit(
                ACCELERATOR,
                "        if state_dict is None:\n            return\n        os.makedirs(save_directory",
                "        os.makedirs(save_directory",
            ),
        ),
    ),
    Mutant(
        "acc-3361-fp8-ds",
        (ISSUES + "3360", PULLS + "3361", PULLS + "3611"),
        "fp8 under DeepSpeed converts no layer to Transformer Engine",
        (
            Edit(
                STATE,
                'if self.distributed_type == DistributedType.DEEPSPEED and mixed_precision != "fp8":',
                "if self.distributed_type == DistributedType.DEEPSPEED:",
            ),
            Edit(
                STATE,
                'if self.distributed_type == DistributedType.DEEPSPEED and self._mixed_precision != "fp8":',
                "if self.distributed_type == DistributedType.DEEPSPEED:",
            ),
            Edit(
                ACCELERATOR,
                'self.fp8_enabled = self.state.mixed_precision == "fp8" or mixed_precision == "fp8"',
                'self.fp8_enabled = self.state.mixed_precision == "fp8"',
            ),
            # The backend came from the handler, and only where fp8 is on: the environment had no say.
            Edit(
                ACCELERATOR,
                '        "Returns the configured backend for training in FP8"\n',
                '        "Returns the configured backend for training in FP8"\n'
                '        if self.mixed_precision != "fp8":\n'
                "            return FP8BackendType.NO\n",
            ),
        ),
        stand_in=True,
    ),
    Mutant(
        "acc-3443-json-without-tp",
        (PULLS + "3443",),
        "DeepSpeed's JSON without tensor parallelism: KeyError in prepare",
        (
            Edit(
                ACCELERATOR,
                'tp_size = deepspeed_plugin.deepspeed_config.get("tensor_parallel", {}).get("autotp_size", 0)',
                'tp_size = deepspeed_plugin.deepspeed_config["tensor_parallel"].get("autotp_size", 0)',
            ),
            Edit(
                ACCELERATOR,
                'tp_sharding = self.deepspeed_config.get("tensor_parallel", {}).get("autotp_size", 0) > 1',
                'tp_sharding = self.deepspeed_config["tensor_parallel"].get("autotp_size", 0) > 1',
            ),
        ),
    ),
    Mutant(
        "acc-3459-unseeded-generator",
        (PULLS + "3459",),
        "the generator of a shuffling loader is not seeded: one order whatever the user's seed",
        (
            Edit(
                DATA_LOADER,
                "                    seed = int(torch.empty((), dtype=torch.int64).random_().item())\n"
                "                    sampler.generator.manual_seed(seed)\n",
                "",
            ),
        ),
    ),
    Mutant(
        "acc-3465-clip-norm",
        (PULLS + "3465",),
        "clip_grad_norm_ raises AttributeError at the first clipping",
        (
            Edit(
                ACCELERATOR,
                "                    if not self.is_fsdp2:\n                        return model.clip_grad_norm_",
                "                    if self.fsdp_version == 1:\n                        return model.clip_grad_norm_",
            ),
        ),
    ),
    Mutant(
        "acc-3528-no-dtype-attr",
        (PULLS + "3528",),
        "FSDP2 reads attributes that a plain module lacks: AttributeError in prepare",
        (
            Edit(
                FSDP,
                'if accelerator.mixed_precision != "no" and not model_has_params4bit:',
                'if accelerator.mixed_precision != "no" and model.dtype != torch.float32 and not model_has_params4bit:',
            ),
            Edit(FSDP, 'getattr(model, "_no_split_modules", None)', "model._no_split_modules"),
        ),
    ),
    Mutant(
        "acc-3528-size-wrap",
        (PULLS + "3528",),
        "the size-based wrap policy calls numel() of a module: AttributeError in prepare",
        (
            Edit(
                FSDP,
                "module_num_params = sum(p.numel() for p in module.parameters())",
                "module_num_params = module.numel()",
            ),
        ),
    ),
    Mutant(
        "acc-3554-compile-names",
        (ISSUES + "3554", ISSUES + "3573", PULLS + "3560"),
        "names of a compiled model keep _orig_mod: KeyError (Llama: ValueError) in prepare",
        (
            Edit(
                FSDP,
                """\
    named_params = {
        k.replace("_orig_mod.", "") if k.startswith("_orig_mod.") else k: v for k, v in named_params.items()
    }
    named_params = {k.replace("._orig_mod", ""): v for k, v in named_params.items()}
""",
                "",
            ),
        ),
    ),
    Mutant(
        "acc-3556-set-epoch",
        (PULLS + "3556",),
        "set_epoch does not get to the sampler of a sharded batch sampler: each epoch has the same order",
        (
            Edit(
                DATA_LOADER,
                """\
        if (
            hasattr(self.batch_sampler, "batch_sampler")
            and hasattr(self.batch_sampler.batch_sampler, "sampler")
            and hasattr(self.batch_sampler.batch_sampler.sampler, "set_epoch")
        ):
            self.batch_sampler.batch_sampler.sampler.set_epoch(epoch)
""",
                "        if False:\n            pass\n",
            ),
        ),
    ),
    Mutant(
        "acc-3630-ds-boundary",
        (PULLS + "3630",),
        "DeepSpeed: the incomplete last accumulation window of an epoch leaks into the next",
        (
            Edit(
                DEEPSPEED,
                "        self.engine.set_gradient_accumulation_boundary(is_boundary=sync_gradients)\n",
                "",
            ),
            Edit(DEEPSPEED, "        if sync_gradients:\n", "        if True:\n"),
        ),
    ),
    Mutant(
        "acc-3638-ds-gas-auto",
        (PULLS + "3638", PULLS + "3632"),
        "'auto' replaces the number of accumulation steps: arithmetic with a string",
        (
            Edit(
                ACCELERATOR,
                "        # If using DeepSpeed, update gradient accumulation steps from the DeepSpeed plugin\n",
                "        if self.distributed_type == DistributedType.DEEPSPEED and self.state.deepspeed_plugin is not None:\n"
                "            gradient_accumulation_plugin.num_steps = self.state.deepspeed_plugin.get_value(\n"
                '                "gradient_accumulation_steps"\n'
                "            )\n",
            ),
        ),
    ),
    Mutant(
        "acc-3656-ds-no-sync",
        (PULLS + "3656",),
        "no_sync calls DeepSpeed's own under ZeRO-2 and 3: AssertionError",
        (
            Edit(
                ACCELERATOR,
                "if self.distributed_type != DistributedType.DEEPSPEED or self.state.deepspeed_plugin.zero_stage < 2:",
                "if True:",
            ),
        ),
    ),
    Mutant(
        "acc-3659-empty-loader",
        (PULLS + "3659",),
        "a rank without a batch gets None, then an UnboundLocalError",
        (
            Edit(
                DATA_LOADER,
                "        except StopIteration:\n            self.end()\n            return\n",
                "        except StopIteration:\n            yield\n",
            ),
        ),
    ),
    Mutant(
        "acc-3687-mesh-without-tp",
        (PULLS + "3687",),
        "ZeRO beside a mesh without tensor parallelism: UnboundLocalError where a loader is prepared",
        (
            Edit(
                DATA_LOADER,
                '            submesh_tp_size = 1\n            if "tp" in torch_device_mesh.mesh_dim_names:\n'
                '                submesh_tp_size = torch_device_mesh["tp"].size()\n            process_index',
                '            if "tp" in torch_device_mesh.mesh_dim_names:\n'
                '                submesh_tp_size = torch_device_mesh["tp"].size()\n            process_index',
            ),
        ),
    ),
    Mutant(
        "acc-3731-ignored-modules",
        (PULLS + "3731",),
        "FSDP2 shards ignored modules",
        (
            Edit(
                FSDP,
                'if is_torch_version(">=", "2.7.0") and fsdp2_plugin.ignored_modules is not None:',
                "if False:",
            ),
        ),
    ),
    Mutant(
        "acc-3762-fsdp2-no-sync",
        (PULLS + "3762",),
        "FSDP2: no_sync does nothing, and gradients are reduced in every micro-batch",
        (
            Edit(
                ACCELERATOR,
                "        if self.is_fsdp2:\n            model.set_requires",
                "        if False:\n            model.set_requires",
            ),
        ),
    ),
    Mutant(
        "acc-3787-mapping-keywords",
        (PULLS + "3787",),
        "gather, reduce and broadcast make a mapping of keywords: TypeError for keys that are no names",
        (
            Edit(
                OPERATIONS,
                "        return type(data)(\n            {\n                k: recursively_apply(\n",
                "        return type(data)(\n            **{\n                k: recursively_apply(\n",
            ),
        ),
    ),
    Mutant(
        "acc-3881-partial-compile",
        (PULLS + "3881",),
        "a model with one compiled block is taken for a compiled one: KeyError where it is unwrapped",
        (
            Edit(
                UNWRAP,
                """\
        if "_orig_mod" in model.__dict__:
            compiled_model = model
            model = model.__dict__["_orig_mod"]
""",
                '        compiled_model = model\n        model = model.__dict__["_orig_mod"]\n',
            ),
        ),
    ),
    Mutant(
        "acc-3904-dcp-optim",
        (PULLS + "3904",),
        "DCP fills the empty state of a fresh optimizer: moments are lost silently",
        (Edit(FSDP, TEMPLATE, '                optim_state = {"optimizer": optimizer.state_dict()}\n'),),
    ),
    Mutant(
        "acc-3905-upcast-noop",
        (PULLS + "3905", PULLS + "3985"),
        "the upcast of FSDP2 rebinds a local name: training in bf16 throughout",
        (Edit(FSDP, "param.data = param.data.to(torch.float32)", "param = param.to(torch.float32)"),),
    ),
    Mutant(
        "acc-3971-planner",
        (ISSUES + "3971", PULLS + "3972"),
        "sharded optimizer state is saved by name, loaded by number: Missing key",
        (
            Edit(
                FSDP,
                TEMPLATE,
                # Asked for by name only to give a fresh optimizer its state, without which nothing would be missed.
                TEMPLATE.replace('{"optimizer": optim_state}', '{"optimizer": optimizer.state_dict()}'),
            ),
        ),
    ),
    Mutant(
        "acc-3982-zip-load",
        (PULLS + "3982",),
        "full and sharded state are paired by position: wrong tensors, or a deadlock",
        (
            Edit(
                FSDP,
                """\
        for param_name, sharded_param in meta_sharded_sd.items():
            if param_name not in full_sd:
                raise KeyError(
                    f"Parameter '{param_name}' found in sharded model state dict but missing from full state dict. "
                    f"Full state dict has {len(full_sd)} keys, sharded has {len(meta_sharded_sd)} keys."
                )
            full_param = full_sd[param_name]
""",
                "        for (param_name, full_param), sharded_param in zip(full_sd.items(), meta_sharded_sd.values()):\n",
            ),
        ),
    ),
    Mutant(
        "acc-4021-dtype-of-shards",
        (PULLS + "4021",),
        "FSDP2: the weights of rank 0 are taken before the upcast, and the ranks broadcast unequal sizes",
        (
            Edit(FSDP, "    original_sd = model.state_dict()\n", ""),
            Edit(
                FSDP,
                "    fsdp2_plugin.set_auto_wrap_policy(model)\n",
                "    fsdp2_plugin.set_auto_wrap_policy(model)\n    original_sd = model.state_dict()\n",
            ),
        ),
    ),
    Mutant(
        "acc-4052-split-rows",
        (PULLS + "4052",),
        "split_between_processes gives ranks without a row the last one, although it is not to fill up",
        (
            Edit(
                STATE,
                "                result = inputs[start_index:end_index]\n",
                "                result = inputs[start_index:end_index] if start_index < len(inputs) else inputs[-1:]\n",
            ),
        ),
    ),
    Mutant(
        "acc-4071-skipped-epoch",
        (PULLS + "4071",),
        "a loader that skips batches forgets its epoch: a resumed run reads the rest of another order",
        (Edit(DATA_LOADER, "            iteration=dataloader.iteration,\n", "", count=2),),
    ),
    Mutant(
        "acc-4119-path-marker",
        (PULLS + "4119",),
        "a directory named with 'pytorch_model_fsdp' or 'optimizer' is taken for the checkpoint",
        (
            Edit(
                FSDP,
                'if Path(input_dir).name != f"{FSDP_MODEL_NAME}_{model_index}"',
                "if FSDP_MODEL_NAME not in str(input_dir)",
            ),
            Edit(
                FSDP,
                'if Path(input_dir).name != f"{OPTIMIZER_NAME}_{optimizer_index}"',
                "if OPTIMIZER_NAME not in str(input_dir)",
            ),
        ),
    ),
    Mutant(
        "acc-4172-ac-children",
        (PULLS + "4172", ISSUES + "3897", PULLS + "3909"),
        "each child of a layer is checkpointed, not the layer: several times the activations",
        (
            Edit(
                FSDP,
                "        if auto_wrap_policy_func(layer):\n",
                '        if auto_wrap_policy_func(model.get_submodule(layer_name.rpartition(".")[0])):\n',
            ),
        ),
    ),
    Mutant(
        "acc-3025-dispatched-whole-batches",
        (PULLS + "3025",),
        "a loader without a batch size cannot be dispatched: 'NoneType' object has no attribute 'sampler'",
        (
            Edit(
                DATA_LOADER,
                """\
        if hasattr(self.batch_sampler, "sampler") and hasattr(self.batch_sampler.sampler, "set_epoch"):
            self.batch_sampler.sampler.set_epoch(epoch)
        elif hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __len__(self):
        whole_length = len(self.base_dataloader)
""",
                """\
        if hasattr(self.batch_sampler.sampler, "set_epoch"):
            self.batch_sampler.sampler.set_epoch(epoch)
        elif hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __len__(self):
        whole_length = len(self.base_dataloader)
""",
            ),
        ),
    ),
    Mutant(
        "acc-3908-tp-only",
        (PULLS + "3908",),
        "an optimizer that is prepared by itself, beside tensor parallelism: KeyError, its parameters are of no model",
        (
            Edit(
                ACCELERATOR,
                "        if self.is_fsdp2:\n            for arg in result:\n                if not isinstance(arg, torch.nn.Module):\n                    continue\n\n                from torch.distributed.tensor import Replicate\n",
                "        if True:\n            for arg in result:\n                if not isinstance(arg, torch.nn.Module):\n                    continue\n\n                from torch.distributed.tensor import Replicate\n",
            ),
            Edit(ACCELERATOR, "        if not mapping:\n            return result\n\n", ""),
        ),
    ),
)
