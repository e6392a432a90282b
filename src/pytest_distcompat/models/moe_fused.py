"""Mixture of experts whose weights are one tensor, which expert parallelism can cut."""

from __future__ import annotations

from pytest_distcompat.models._classifier import classifier

#: As torchtitan has it: the router stays whole, experts are cut by the driver (``strategies/_expert.py``).
_TP_PLAN = {**dict.fromkeys(("inlet", "block.linear"), "colwise_gather"), "outlet": "rowwise_split"}

MOE_FUSED = classifier(
    "moe_fused",
    "FusedMixture",
    blocks=("Block", "Experts"),
    frozen_modules=("inlet",),
    experts="experts",
    tp_plan=_TP_PLAN,
    spread=2.5,
    order=11,
)
