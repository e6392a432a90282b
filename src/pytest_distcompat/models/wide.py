"""MLP whose layers are wide enough for quantized optimizer state, on each of four ranks that shard it."""

from __future__ import annotations

from pytest_distcompat.models._classifier import classifier

WIDTH = 128

WIDE = classifier(
    "wide",
    "MLP",
    WIDTH,
    frozen_modules=("inlet",),
    ignored_module="frozen",
    largest=WIDTH**2,
    # 2.1e-3 measured in bf16_mixed, with optimizer state in 8 bits up to 6.8e-3.
    spread=10.0,
    order=13,
)
