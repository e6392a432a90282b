"""Mixture of experts by DeepSpeed's own layer, whose experts its engine can spread over ranks."""

from __future__ import annotations

from pytest_distcompat.models._classifier import classifier

MOE_DEEPSPEED = classifier("moe_deepspeed", "DeepSpeedMixture", spread=2.5, experts="moe", driver="deepspeed", order=12)
