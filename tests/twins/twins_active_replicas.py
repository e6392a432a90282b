"""Trainers whose replicas train on their own, all of the model or a part."""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING, Any

from .declare import CLIPPING, GRADIENTS, PARITY, Torch, twin
from .twins_active import APART

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch.nn import Module

    from pytest_distcompat.cell import Cell
    from pytest_distcompat.models import Batch
    from pytest_distcompat.precisions import Precision


@twin(
    "active",
    "ddp-fp32-w2-model_mlp",
    match=r"MLP runs as a bare model; expected DDP(?s:.*)no gradient was reduced(?s:.*)replicas must stay equal",
    also={**PARITY, **CLIPPING, "dtypes": APART, **GRADIENTS},
)
class Bare(Torch):
    """Nobody wraps the model."""

    def wrap(self, model: Module, precision: Precision, cell: Cell, device: torch.device) -> Module:
        return model


@twin(
    "active",
    "ddp-fp32-w2-model_mlp",
    match=r"no gradient was reduced in a step(?s:.*)rank 1: \d+ parameters differ from rank 0's",
    also={**PARITY, **CLIPPING, "dtypes": APART, **GRADIENTS},
)
class NeverSyncs(Torch):
    """DDP that is left in ``no_sync``, as wrong bookkeeping of gradient accumulation leaves it."""

    def wrap(self, model: Module, precision: Precision, cell: Cell, device: torch.device) -> Module:
        wrapped: Any = super().wrap(model, precision, cell, device)
        wrapped.require_backward_grad_sync = False
        ddp: Module = wrapped
        return ddp


@twin(
    "active",
    "ddp-fp32-w2-model_mlp",
    match=r"^rank 1: 12 parameters differ from rank 0's after 20 steps, first 'module\.inlet\.weight'; replicas must stay equal",
    also={**PARITY, **CLIPPING},
)
class SkipsOneStep(Torch):
    """The last rank skips a step in which its own loss is a spike, long after the first steps."""

    def step(self, number: int) -> float:
        model = self.model.state_dict()
        before = {name: value.clone() for name, value in model.items()}
        loss = super().step(number)
        if number == 7 and self.world.rank == self.world.size - 1:
            for name, value in model.items():
                value.copy_(before[name])
        return loss


@twin(
    "active",
    "ddp-fp32-w2",
    match=r"only 8 elements were reduced in a step, of 26784 trainable ones",
    also={**PARITY, "dtypes": APART, **GRADIENTS},
)
class OnlyMetricsMeet(NeverSyncs):
    """The twin above in a trainer that gives all ranks the same data: replicas stay equal by luck."""

    def batch_of(self, place: int, rank: int) -> Batch:
        return super().batch_of(place, 0)

    def step(self, number: int) -> float:
        import torch
        from torch import distributed

        loss = super().step(number)
        distributed.all_reduce(torch.full((8,), loss))
        return loss


@twin(
    "active",
    "ddp-fp32-w2-model_mlp",
    match=r"rank 1: 12 parameters differ from rank 0's after three steps, first 'module\.inlet",
    also={**PARITY, **CLIPPING, **GRADIENTS},
)
class LayerNotReduced(Torch):
    """DDP that ignores the last layer: clipped by norms of their own, ranks part in all the others."""

    def wrap(self, model: Module, precision: Precision, cell: Cell, device: torch.device) -> Module:
        from torch.nn.parallel import DistributedDataParallel

        ignored = ["outlet.weight", "outlet.bias"]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)  # type: ignore[no-untyped-call]
        return super().wrap(model, precision, cell, device)


@twin(
    "active",
    "ddp-fp32-w2-model_mlp",
    match=r"rank 1: the process group has 1 ranks; expected 2(?s:.*)replicas must stay equal",
    also={**PARITY, **CLIPPING, **GRADIENTS},
)
class GroupOfOne(Torch):
    """Each rank opens a process group of its own, as a trainer does that does not read torchrun's environment."""

    def build(self, model: Module) -> None:
        from torch import distributed

        alone = f"file://{tempfile.mkdtemp()}/store"
        distributed.init_process_group(self.world.backend, init_method=alone, rank=0, world_size=1)
        super().build(model)

    def save(self, directory: Path) -> None:
        if self.world.rank == 0:
            super().save(directory)
