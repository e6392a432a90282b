"""Mutants of torch: each one undoes the fix of an upstream bug."""

from __future__ import annotations

from .mutation import Edit, Mutant

STATE_DICT = "torch/distributed/checkpoint/state_dict.py"
TENSOR = "torch/distributed/tensor"
#: Releases that have the fixes of the third draw; torch's history was not at hand.
IN_2_11 = ("https://github.com/pytorch/pytorch/compare/v2.10.0...v2.11.0",)
IN_2_12 = ("https://github.com/pytorch/pytorch/compare/v2.11.0...v2.12.0",)
IN_2_13 = ("https://github.com/pytorch/pytorch/compare/v2.12.0...v2.13.0",)

MUTANTS = (
    Mutant(
        "pt-125708-init-optim-lr",
        ("https://github.com/pytorch/pytorch/issues/121186", "https://github.com/pytorch/pytorch/pull/125708"),
        "the step that creates optimizer state keeps its learning rate: weight decay moves parameters",
        (
            Edit(
                STATE_DICT,
                """\
            param_group["lr"] = (
                torch.tensor(0.0)
                if isinstance(param_group["lr"], torch.Tensor)
                else 0.0
            )
""",
                "",
            ),
        ),
    ),
    Mutant(
        "pt-frozen-shards",
        IN_2_11,
        "tensor parallelism trains the frozen layers that it splits",
        (
            Edit(f"{TENSOR}/parallel/style.py", "                requires_grad=param.requires_grad,\n", "", 3),
            Edit(f"{TENSOR}/parallel/style.py", "                requires_grad=module.weight.requires_grad,\n", ""),
            Edit(f"{TENSOR}/parallel/style.py", "                    requires_grad=module.bias.requires_grad,\n", ""),
            Edit(f"{TENSOR}/_api.py", "                        requires_grad=param.requires_grad,\n", ""),
        ),
    ),
    Mutant(
        "pt-strided-safe",
        IN_2_12,
        "torch.load refuses shards of FSDP2 beside tensor parallelism",
        (Edit(f"{TENSOR}/__init__.py", "        Shard,\n        _StridedShard,\n", "        Shard,\n"),),
    ),
    Mutant(
        "pt-squeeze-arguments",
        IN_2_12,
        "squeeze of a DTensor loses the dimensions that it was rewritten with",
        (
            Edit(
                f"{TENSOR}/_dispatch.py",
                """\
        if use_val_from_redistribute_schema:
            for i in range(
                len(op_info.flat_args_schema), len(flatten_args_schema_to_reshard)
            ):
                new_local_args.append(flatten_args_schema_to_reshard[i])
""",
                "",
            ),
        ),
    ),
    Mutant(
        "pt-reshard-frozen",
        IN_2_12,
        "a frozen parameter that FSDP2 reshards to fewer ranks becomes one that requires a gradient",
        (
            Edit(
                "torch/distributed/fsdp/_fully_shard/_fsdp_param.py",
                """\
            self.to_sharded_post_forward_dtensor(sharded_post_forward_tensor),
            requires_grad=self.sharded_param.requires_grad,
""",
                "            self.to_sharded_post_forward_dtensor(sharded_post_forward_tensor)\n",
            ),
        ),
    ),
    Mutant(
        "pt-fsdp1-group",
        IN_2_13,
        "the optimizer state of FSDP1 in a group of ranks waits for all ranks",
        (Edit(STATE_DICT, "                    group=_get_fsdp_process_group(model, info),\n", "", 2),),
    ),
)
