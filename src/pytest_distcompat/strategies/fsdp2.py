"""fully_shard: every parameter a DTensor, sharded on its first dimension."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pytest_distcompat.strategies import _fsdp
from pytest_distcompat.strategies._base import OF_DEEPSPEED, Strategy
from pytest_distcompat.strategies._fsdp import ignored_modules

if TYPE_CHECKING:
    import torch
    from torch.nn import Module

    from pytest_distcompat.cell import Cell
    from pytest_distcompat.precisions import Precision


def _torch(model: Module, precision: Precision, cell: Cell, device: torch.device) -> Module:
    import torch
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    from pytest_distcompat.models import MODELS

    whole = _take_weights(model) if cell.option("meta_init") else None
    if whole is None:
        model.to(device)
    ignored = {parameter for module in ignored_modules(model, cell) for parameter in module.parameters()}
    settings: dict[str, Any] = {
        "mesh": _fsdp.mesh(cell, device),
        "mp_policy": _fsdp.policy(2, precision, cell) or MixedPrecisionPolicy(),
        "reshard_after_forward": bool(cell.option("reshard_after_forward")),
        # Pinned memory needs a GPU that it is pinned for.
        "offload_policy": CPUOffloadPolicy(pin_memory=device.type == "cuda")
        if cell.option("cpu_offload")
        else OffloadPolicy(),
        "ignored_params": ignored or None,
    }
    # Blocks before the root: a module that is sharded already is no part of its parent's unit.
    for block in MODELS.get(str(cell.option("model"))).block_modules(model):
        fully_shard(block, **settings)
    fully_shard(model, **settings)
    if whole is not None:
        _give_weights(model, whole, torch.device("cpu") if cell.option("cpu_offload") else device)
    return model


def _take_weights(model: Module) -> dict[str, torch.Tensor]:
    """Leave the model without memory; its weights and all its buffers."""
    whole = {**model.state_dict(), **dict(model.named_buffers())}
    model.to("meta")
    return whole


def _give_weights(model: Module, whole: dict[str, torch.Tensor], device: torch.device) -> None:
    """Memory for the shards, then rank 0's weights for all.

    Buffers that no state dict holds are the author's own business: they would stay whatever memory held.
    """
    import torch
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    model.to_empty(device=device)
    saved: dict[str, Any] = {name: whole[name] for name in model.state_dict()}
    set_model_state_dict(model, saved, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(whole[name])


def _accelerate(precision: Precision, cell: Cell) -> Mapping[str, Any]:
    return _fsdp.plugin(2, precision, cell)


def _transformers(precision: Precision, cell: Cell) -> Mapping[str, Any]:
    return _fsdp.arguments(2, cell)


FSDP2 = Strategy(
    "fsdp2",
    meaning="torch.distributed.fsdp.fully_shard: parameters are DTensors",
    dtypes=_fsdp.dtypes,
    wrapper="FSDP2",
    kind="DTensor",
    shards=True,
    torch=_torch,
    accelerate=_accelerate,
    transformers=_transformers,
    options={"no_use_orig_params": "FSDP2 has no flat parameters", **OF_DEEPSPEED},
    order=2,
)
