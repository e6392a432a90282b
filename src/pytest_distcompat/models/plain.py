"""A plain nn.Module: odd sizes (uneven shards), one persistent and one non-persistent buffer, one frozen layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_distcompat.models._base import TinyModel

if TYPE_CHECKING:
    import torch
    from torch.nn import Module

    from pytest_distcompat.models._base import Batch

FEATURES, WIDTH, CLASSES = 7, 13, 5


def _make() -> Module:
    from pytest_distcompat.models._plain_module import PlainModule

    return PlainModule(FEATURES, WIDTH, CLASSES)


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


PLAIN = TinyModel(
    "plain", ("Block",), _make, _batch, _loss, preload=("pytest_distcompat.models._plain_module",), order=2
)
