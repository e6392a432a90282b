"""Reads a model: first unwrapped, as the oracle, then as the trainer has it."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from pytest_distcompat.probe.blocks import declared_blocks, is_a, multiplies, named_blocks
from pytest_distcompat.probe.optimizer import copied, entries
from pytest_distcompat.probe.tensors import digest, dtype_name, local_of, zero3_shard
from pytest_distcompat.trace import ModelInfo, ParameterInfo, UnwrappedInfo

if TYPE_CHECKING:
    from torch.nn import Module


def as_module(model: object, what: str, how: str) -> None:
    """Raise TypeError for what is no model: all that reads it would fail by a name that says nothing to its author."""
    if not isinstance(model, torch.nn.Module):
        told = f"{model!r:.100}" if model is None else f"a {type(model).__name__}: {model!r:.100}"
        raise TypeError(f"{what} is {told}; expected a torch.nn.Module, {how}")


def read_unwrapped(
    model: Module, blocks: tuple[str, ...] = (), ignored_modules: tuple[str, ...] = (), obeyed: tuple[str, ...] = ()
) -> UnwrappedInfo:
    """Names, shapes and dtypes of a model that nothing has wrapped; groups of names that are one tied parameter.

    ``blocks`` are class names, where none are given those that the model declares: the names of the modules that have one
    of them go into the trace.
    """
    as_module(model, "the unwrapped model", "which build_model() and reload() return")
    classes = blocks or declared_blocks(model)
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    parameters = tuple(_unwrapped(name, parameter) for name, parameter in model.named_parameters())
    state_dict = tuple(model.state_dict())
    buffers = tuple(
        _unwrapped(name, buffer, placement="persistent" if name in state_dict else "non-persistent")
        for name, buffer in model.named_buffers()
    )
    tied = tuple(tuple(group) for group in names.values() if len(group) > 1)
    return UnwrappedInfo(
        parameters,
        buffers,
        state_dict,
        tied,
        blocks=named_blocks(model, classes),
        block_classes=classes,
        ignored_modules=ignored_modules,
        obeyed=obeyed,
        linears=sum(isinstance(module, torch.nn.Linear) and _for_8_bits(module) for module in model.modules()),
        products=sum(multiplies(module) for module in model.modules()),
    )


def _for_8_bits(linear: torch.nn.Linear) -> bool:
    """In 8 bits a product needs sizes that 16 divides."""
    return not (linear.in_features % 16 or linear.out_features % 16)


def _unwrapped(name: str, tensor: torch.Tensor, placement: str = "") -> ParameterInfo:
    return ParameterInfo(
        name=name,
        shape=tuple(tensor.shape),
        dtype=dtype_name(tensor.dtype),
        trainable=tensor.requires_grad,
        placement=placement,
        local_numel=tensor.numel(),
        digest=digest(tensor),
    )


def read_model(model: Module, optimizer: Any, trainer_world_size: int | None) -> ModelInfo:
    """The live model: what wraps it, each parameter as this rank stores it, and how the optimizer holds it.

    ``optimizer`` is the trainer's, wrapped or not, or None.
    """
    from torch import distributed

    held: Counter[int] = Counter()
    stage = _zero_stage(model)
    flat = bool(stage)
    if optimizer is not None and not flat:
        copies = copied(optimizer)
        held = Counter(id(copies.get(id(p), p)) for p in entries(optimizer))
    wrappers = _wrappers(model)
    parameters = tuple(
        _live(name, parameter, wrappers, held=None if flat else held[id(parameter)])
        for name, parameter in model.named_parameters()
    )
    buffers = tuple(_unwrapped(name, buffer) for name, buffer in model.named_buffers())
    ready = distributed.is_available() and distributed.is_initialized()
    return ModelInfo(
        type=type(model).__name__,
        wrappers=wrappers,
        parameters=parameters,
        buffers=buffers,
        world_size=distributed.get_world_size() if ready else 1,
        # A trainer may have it as text, from the environment.
        trainer_world_size=None if trainer_world_size is None else int(trainer_world_size),
        backend=str(distributed.get_backend()) if ready else "",
        zero_stage=stage,
        units=tuple(_units(model)),
        checkpointed=tuple(_checkpointed(model)),
        compiled=tuple(compiled_modules(model)),
        float8=sum("Float8" in type(module).__name__ or _of_te(module) for module in model.modules()),
        graphs=_graphs(),
        shard_group=tuple(_shard_group(model)),
    )


def _shard_group(model: Module) -> list[int]:
    """The ranks that hold this copy of the model: a row of the mesh that parameters are sharded on, or FSDP1's group."""
    from torch import distributed
    from torch.distributed.fsdp import FullyShardedDataParallel

    for module in model.modules():
        if isinstance(module, FullyShardedDataParallel):
            return distributed.get_process_group_ranks(module.process_group)
    for parameter in model.parameters():
        # A DTensor has them: https://docs.pytorch.org/docs/stable/distributed.tensor.html.
        for dimension, placement in enumerate(getattr(parameter, "placements", ())):
            if placement.is_shard():
                mesh: Any = parameter.device_mesh  # type: ignore[attr-defined]  # a plain tensor has none
                return distributed.get_process_group_ranks(mesh.get_group(dimension))
    return []


def _units(model: Module) -> Iterator[str]:
    """The modules that FSDP wraps."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    for name, module in model.named_modules():
        if isinstance(module, (FSDPModule, FullyShardedDataParallel)):
            yield name


def _checkpointed(model: Module) -> Iterator[str]:
    """The modules whose activations are recomputed: wrapped for it, or told so, as transformers tells its layers."""
    for name, module in model.named_modules():
        # fully_shard makes a class of its own of the one it is given: FSDPCheckpointWrapper.
        if is_a(module, "CheckpointWrapper") or getattr(module, "gradient_checkpointing", False) is True:
            yield name


def compiled_modules(model: Module) -> Iterator[str]:
    """The modules that torch.compile wraps, or that were compiled in place.

    In place leaves a private trace only, ``_compiled_call_impl``; ``tests/spawn/test_private_names.py`` says when it
    goes away.
    """
    for name, module in model.named_modules():
        if is_a(module, "OptimizedModule") or getattr(module, "_compiled_call_impl", None) is not None:
            yield name


def _of_te(module: Module) -> bool:
    """A linear layer of Transformer Engine, which need not be installed; by its sizes, for its weight may be a flat shard."""
    return type(module).__module__.startswith("transformer_engine") and hasattr(module, "in_features")


def _graphs() -> int:
    """How many graphs torch.compile has made in this process: private, held by ``tests/spawn/test_private_names.py``.

    A model can be wrapped by torch.compile and run uncompiled all the same.
    """
    if "torch._dynamo" not in sys.modules:
        return 0
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


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
        elif is_a(module, "DeepSpeedEngine"):
            found["DeepSpeedEngine"] += 1
        if is_a(module, "OptimizedModule"):
            found["OptimizedModule"] += 1
    return dict(found)


def _zero_stage(model: Module) -> int | None:
    """The stage that a DeepSpeed engine runs; the engine may be inside a wrapper."""
    for module in model.modules():
        stage = getattr(module, "zero_optimization_stage", None)
        if callable(stage):
            return int(stage())
    return None


def _live(name: str, parameter: torch.Tensor, wrappers: dict[str, int], held: int | None) -> ParameterInfo:
    from torch.distributed.fsdp import FlatParameter

    shape, kind, placement, local = tuple(parameter.shape), "Tensor", "", parameter
    if hasattr(parameter, "ds_shape"):  # ZeRO-3: the parameter itself is empty between uses, its shard is beside it
        shape, kind, placement = tuple(parameter.ds_shape), "ZeRO-3", "partition"
        local = zero3_shard(parameter)
    elif hasattr(parameter, "placements"):
        kind, placement = "DTensor", ", ".join(repr(one) for one in parameter.placements)
        local = local_of(parameter)
    elif isinstance(parameter, FlatParameter):  # by an attribute: its class is plain nn.Parameter
        kind, placement = "FlatParameter", "flat shard"
    elif "FSDP1" in wrappers:
        # With use_orig_params each parameter is a one-dimensional view of this rank's part of the flat one (maybe empty).
        kind, placement = "FSDP1 shard", "flat shard"
    return ParameterInfo(
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
