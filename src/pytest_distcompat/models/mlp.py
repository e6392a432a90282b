"""MLP as nn.Module: odd sizes (uneven shards), a persistent and a non-persistent buffer, a frozen layer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pytest_distcompat.models._base import TinyModel

if TYPE_CHECKING:
    import torch
    from torch.nn import Module

    from pytest_distcompat.models._base import Batch

FEATURES, WIDTH, CLASSES = 7, 13, 5


def _make() -> Module:
    from pytest_distcompat.models._mlp_module import MLP

    return MLP(FEATURES, WIDTH, CLASSES)


def _batch(step: int, rank: int) -> Batch:
    import torch

    generator = torch.Generator().manual_seed(1000 * step + rank)
    return {
        "features": torch.randn(4, FEATURES, generator=generator),
        "labels": torch.randint(0, CLASSES, (4,), generator=generator),
    }


def _loss(model: Module, batch: Batch) -> torch.Tensor:
    from torch.nn import functional

    logits = model(batch["features"])
    return functional.cross_entropy(logits.float(), batch["labels"])


def _count(batch: Batch) -> int:
    return len(batch["labels"])


def _outputs(model: Module, batch: Batch) -> torch.Tensor:
    logits: torch.Tensor = model(batch["features"])
    return logits


def _reload(directory: Path) -> Module:
    """Load an exported state dict, key by key: an nn.Module has no loader of its own."""
    from safetensors.torch import load_file

    model = _make()
    found = load_file(directory / "model.safetensors")
    for name, parameter in model.named_parameters():
        # load_state_dict copies into the parameters, which would round or widen what was saved.
        if name in found:
            parameter.data = parameter.data.to(found[name].dtype)
    model.load_state_dict(found)
    return model


MLP_MODEL = TinyModel(
    "mlp",
    ("Block",),
    _make,
    _batch,
    _loss,
    _count,
    _outputs,
    _reload,
    frozen_modules=("inlet",),
    ignored_module="frozen",
    unit_size=200,
    in_8_bits=False,
    # 1.3e-3 measured in bf16_mixed (autocast over float32 masters under DDP), 2.7e-3 with bfloat16 masters.
    spread=1.7,
    preload=("pytest_distcompat.models._mlp_module", "safetensors.torch"),
    order=2,
)
