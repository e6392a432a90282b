"""fully_shard: every parameter a DTensor, sharded on its first dimension."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pytest_distcompat.strategies import _fsdp
from pytest_distcompat.strategies._base import Strategy

if TYPE_CHECKING:
    import torch
    from torch.nn import Module

    from pytest_distcompat.cell import Cell
    from pytest_distcompat.precisions import Precision


def _torch(model: Module, precision: Precision, cell: Cell, device: torch.device) -> Module:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from pytest_distcompat.models import MODELS

    compute = getattr(torch, precision.compute)
    policy = (
        MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=compute) if precision.mixed else MixedPrecisionPolicy()
    )
    mesh = init_device_mesh(device.type, (cell.world_size,))
    model.to(device)
    # Blocks before the root: a module that is sharded already is no part of its parent's unit.
    for block in MODELS.get(str(cell.option("model"))).block_modules(model):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def _accelerate(precision: Precision, cell: Cell) -> Mapping[str, Any]:
    return _fsdp.plugin(2, cell)


FSDP2 = Strategy(
    "fsdp2",
    meaning="torch.distributed.fsdp.fully_shard: parameters are DTensors",
    dtypes=_fsdp.dtypes,
    wrapper="FSDP2",
    kind="DTensor",
    shards=True,
    torch=_torch,
    accelerate=_accelerate,
    order=2,
)
