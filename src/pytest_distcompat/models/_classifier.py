"""Classifiers of rows of numbers: what the models that are no transformers have in common, data and files."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_distcompat.models._base import TinyModel

if TYPE_CHECKING:
    import torch
    from torch.nn import Module

    from pytest_distcompat.models._base import Batch

FEATURES, WIDTH, CLASSES = 7, 13, 5


def classifier(name: str, class_name: str, width: int = WIDTH, **fields: Any) -> TinyModel:
    """Return the model of a class of ``_modules``, with further fields of TinyModel."""
    make = functools.partial(_make, class_name, width)
    reload = functools.partial(_reload, class_name, width)
    own: dict[str, Any] = {
        "blocks": ("Block",),
        "unit_size": 200,
        "in_8_bits": False,
        "preload": ("pytest_distcompat.models._modules", "safetensors.torch"),
        # 1.3e-3 measured in bf16_mixed (autocast over float32 masters under DDP), 2.7e-3 with bfloat16 masters.
        "spread": 1.7,
    }
    common: dict[str, Any] = {
        "make": make,
        "batch": batch_of,
        "loss": _loss,
        "count": _count,
        "outputs": _outputs,
        "reload": reload,
    }
    return TinyModel(name, **{**common, **own, **fields})


def _make(class_name: str, width: int) -> Module:
    from pytest_distcompat.models import _modules

    model: Module = getattr(_modules, class_name)(FEATURES, width, CLASSES)
    return model


def batch_of(step: int, rank: int) -> Batch:
    """Return four rows, the same for the same numbers in every process."""
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


def _reload(class_name: str, width: int, directory: Path) -> Module:
    """Load an exported state dict, key by key: an nn.Module has no loader of its own."""
    from safetensors.torch import load_file

    model = _make(class_name, width)
    found = load_file(directory / "model.safetensors")
    for name, parameter in model.named_parameters():
        # load_state_dict copies into the parameters, which would round or widen what was saved.
        if name in found:
            parameter.data = parameter.data.to(found[name].dtype)
    model.load_state_dict(found)
    return model
