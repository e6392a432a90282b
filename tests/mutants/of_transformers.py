"""Mutants of transformers' Trainer: each one undoes the fix of an upstream bug."""

from __future__ import annotations

from .mutation import Edit, Mutant

ARGUMENTS = "transformers/training_args.py"
TRAINER = "transformers/trainer.py"
EXPERTS = "transformers/distributed/expert_parallel.py"
MODELING = "transformers/modeling_utils.py"
COLLATORS = "transformers/data/data_collator.py"

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
