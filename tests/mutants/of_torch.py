"""Mutants of torch: each one undoes the fix of an upstream bug."""

from __future__ import annotations

from .mutation import Edit, Mutant

STATE_DICT = "torch/distributed/checkpoint/state_dict.py"

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
)
