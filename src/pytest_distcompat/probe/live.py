"""Reads a model: first unwrapped, as the oracle, then as the trainer has it."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

import torch

from pytest_distcompat.probe.tensors import digest, dtype_name, local_of, zero3_shard
from pytest_distcompat.trace import ModelFact, ParameterFact, PlainFact

if TYPE_CHECKING:
    from torch.nn import Module


def read_plain(model: Module) -> PlainFact:
    """Names, shapes and dtypes of a model that nothing has wrapped; groups of names that are one tied parameter."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    parameters = tuple(_plain(name, parameter) for name, parameter in model.named_parameters())
    persistent = set(model.state_dict())
    buffers = tuple(
        _plain(name, buffer, placement="persistent" if name in persistent else "non-persistent")
        for name, buffer in model.named_buffers()
    )
    tied = tuple(tuple(group) for group in names.values() if len(group) > 1)
    return PlainFact(parameters, buffers, tuple(model.state_dict()), tied)


def _plain(name: str, tensor: torch.Tensor, placement: str = "") -> ParameterFact:
    return ParameterFact(
        name=name,
        shape=tuple(tensor.shape),
        dtype=dtype_name(tensor.dtype),
        trainable=tensor.requires_grad,
        placement=placement,
        local_numel=tensor.numel(),
        digest=digest(tensor),
    )


def read_model(model: Module, optimizer: Any, trainer_world_size: int | None) -> ModelFact:
    """The live model: what wraps it, each parameter as this rank stores it, and how the optimizer holds it.

    ``optimizer`` is the torch optimizer that steps (``optimizer.torch_optimizer``), or None.
    """
    from torch import distributed

    held: Counter[int] = Counter()
    flat = _zero_stage(model) is not None
    if optimizer is not None and not flat:
        held = Counter(id(p) for group in optimizer.param_groups for p in group["params"])
    wrappers = _wrappers(model)
    parameters = tuple(
        _live(name, parameter, wrappers, held=None if flat else held[id(parameter)])
        for name, parameter in model.named_parameters()
    )
    buffers = tuple(_plain(name, buffer) for name, buffer in model.named_buffers())
    ready = distributed.is_available() and distributed.is_initialized()
    return ModelFact(
        type=type(model).__name__,
        wrappers=wrappers,
        parameters=parameters,
        buffers=buffers,
        world_size=distributed.get_world_size() if ready else 1,
        trainer_world_size=trainer_world_size,
        backend=str(distributed.get_backend()) if ready else "",
        zero_stage=_zero_stage(model),
    )


def _wrappers(model: Module) -> dict[str, int]:
    """How often each known wrapper occurs; by class name where the class's own library need not be installed."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.nn.parallel import DistributedDataParallel

    found: Counter[str] = Counter()
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            found["DDP"] += 1
        elif isinstance(module, FullyShardedDataParallel):
            found["FSDP1"] += 1
        elif isinstance(module, FSDPModule):
            found["FSDP2"] += 1
        elif type(module).__name__ == "DeepSpeedEngine":
            found["DeepSpeedEngine"] += 1
        elif type(module).__name__ == "OptimizedModule":
            found["OptimizedModule"] += 1
    return dict(found)


def _zero_stage(model: Module) -> int | None:
    """The stage that a DeepSpeed engine runs; the engine may be inside a wrapper."""
    for module in model.modules():
        stage = getattr(module, "zero_optimization_stage", None)
        if callable(stage):
            return int(stage())
    return None


def _live(name: str, parameter: torch.Tensor, wrappers: dict[str, int], held: int | None) -> ParameterFact:
    shape, kind, placement, local = tuple(parameter.shape), "Tensor", "", parameter
    if hasattr(parameter, "ds_shape"):  # ZeRO-3: the parameter itself is empty between uses, its shard is beside it
        shape, kind, placement = tuple(parameter.ds_shape), "ZeRO-3", "partition"
        local = zero3_shard(parameter)
    elif hasattr(parameter, "placements"):
        kind, placement = "DTensor", ", ".join(repr(one) for one in parameter.placements)
        local = local_of(parameter)
    elif type(parameter).__name__ == "FlatParameter":
        kind, placement = "FlatParameter", "flat shard"
    elif "FSDP1" in wrappers:
        # With use_orig_params each parameter is a one-dimensional view of this rank's part of the flat one (maybe empty).
        kind, placement = "FSDP1 shard", "flat shard"
    return ParameterFact(
        name=name,
        shape=shape,
        dtype=dtype_name(local.dtype),
        trainable=parameter.requires_grad,
        kind=kind,
        placement=placement,
        local_numel=local.numel(),
        digest=digest(local),
        held=held,
    )
