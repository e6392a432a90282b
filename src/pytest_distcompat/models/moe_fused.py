"""Mixture of experts whose weights are one tensor, which expert parallelism can cut."""

from __future__ import annotations

from pytest_distcompat.models._classifier import classifier

MOE_FUSED = classifier(
    "moe_fused",
    "FusedMixture",
    blocks=("Block", "Experts"),
    frozen_modules=("inlet",),
    experts="experts",
    spread=2.5,
    order=10,
)
