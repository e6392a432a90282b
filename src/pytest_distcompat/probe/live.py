"""Reader of models: unwrapped, as the expected state, and as the trainer has wrapped them."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from pytest_distcompat.probe.blocks import declared_blocks, is_a, multiplies, named_blocks
from pytest_distcompat.probe.layouts import autotp_cut, layout_of, named_parameters, wrapper_layouts
from pytest_distcompat.probe.optimizer import entries, master_copies
from pytest_distcompat.probe.tensors import digest, local_of, stored_dtype, zero3_shard
from pytest_distcompat.trace import STAGE, Layout, MeshDim, ModelInfo, ParameterInfo, UnwrappedInfo

if TYPE_CHECKING:
    from torch.nn import Module


def require_module(model: object, name: str, hint: str) -> None:
    """Raise TypeError if ``model`` is not a module, with ``name`` and a ``hint`` that the author of a driver understands."""
    if not isinstance(model, torch.nn.Module):
        description = f"{model!r:.100}" if model is None else f"a {type(model).__name__}: {model!r:.100}"
        raise TypeError(f"{name} is {description}; expected a torch.nn.Module, {hint}")


def read_unwrapped(
    model: Module, blocks: tuple[str, ...] = (), ignored_modules: tuple[str, ...] = (), obeyed: tuple[str, ...] = ()
) -> UnwrappedInfo:
    """Return names, shapes, dtypes and digests of a model that nothing has wrapped, and its groups of tied names.

    Without ``blocks`` the blocks are those that the model declares. Raises TypeError if ``model`` is not a module.
    """
    require_module(model, "the unwrapped model", "which build_model() and reload() return")
    classes = blocks or declared_blocks(model)
    parameters = tuple(parameter_info(name, parameter) for name, parameter in model.named_parameters())
    state_dict = tuple(model.state_dict())
    buffers = tuple(
        parameter_info(name, buffer, persistent=name in state_dict) for name, buffer in model.named_buffers()
    )
    return UnwrappedInfo(
        parameters,
        buffers,
        state_dict,
        tuple(tied_names(model)),
        blocks=named_blocks(model, classes),
        block_classes=classes,
        ignored_modules=ignored_modules,
        obeyed=obeyed,
        linears=sum(isinstance(module, torch.nn.Linear) and _fits_8_bits(module) for module in model.modules()),
        products=sum(multiplies(module) for module in model.modules()),
    )


def tied_names(model: Module) -> list[tuple[str, ...]]:
    """Return the names of each parameter that has several."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    return [tuple(group) for group in names.values() if len(group) > 1]


def _fits_8_bits(linear: torch.nn.Linear) -> bool:
    """Tell whether the layer's sizes are divisible by 16, as products in 8 bits need."""
    return not (linear.in_features % 16 or linear.out_features % 16)


def parameter_info(name: str, tensor: torch.Tensor, *, persistent: bool = False) -> ParameterInfo:
    """Return what is known of a parameter or buffer of the unwrapped model."""
    return ParameterInfo(
        name=name,
        shape=tuple(tensor.shape),
        dtype=stored_dtype(tensor),
        trainable=tensor.requires_grad,
        layout=layout_of(tensor),
        local_numel=local_of(tensor).numel(),
        digest=digest(tensor),
        persistent=persistent,
    )


def read_model(model: Module, optimizer: Any, trainer_world_size: int | None, pp_group: Any = None) -> ModelInfo:
    """Return the live model, of a pipeline this rank's stage: its wrappers, and each parameter as this rank stores it."""
    from torch import distributed

    held: Counter[int] = Counter()
    zero_stage = _zero_stage(model)
    flat = bool(zero_stage)
    if optimizer is not None and not flat:
        masters = master_copies(optimizer)
        held = Counter(id(masters.get(id(p), p)) for p in entries(optimizer))
    wrappers, layouts = _wrappers(model), wrapper_layouts(model)
    parameters = tuple(
        live_parameter_info(name, parameter, layouts, held=None if flat else held[id(parameter)])
        for name, parameter in named_parameters(model)
    )
    pp_ranks = tuple(distributed.get_process_group_ranks(pp_group)) if pp_group is not None else ()
    if pp_ranks:
        stage = MeshDim("pp", len(pp_ranks), pp_ranks.index(distributed.get_rank()), STAGE)
        parameters = tuple(
            replace(info, layout=replace(info.layout, dims=(stage, *info.layout.dims))) for info in parameters
        )
    buffers = tuple(parameter_info(name, buffer) for name, buffer in model.named_buffers())
    ready = distributed.is_available() and distributed.is_initialized()
    return ModelInfo(
        type=type(model).__name__,
        wrappers=wrappers,
        parameters=parameters,
        buffers=buffers,
        world_size=distributed.get_world_size() if ready else 1,
        # A trainer may have it as a string, from the environment.
        trainer_world_size=None if trainer_world_size is None else int(trainer_world_size),
        backend=str(distributed.get_backend()) if ready else "",
        zero_stage=zero_stage,
        units=tuple(_units(model)),
        checkpointed=tuple(_checkpointed(model)),
        compiled=tuple(compiled_modules(model)),
        float8=sum("Float8" in type(module).__name__ or _is_te_linear(module) for module in model.modules()),
        graphs=_graph_count(),
        pp_ranks=pp_ranks,
    )


def _units(model: Module) -> Iterator[str]:
    """Yield the names of the modules that FSDP wraps."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    for name, module in model.named_modules():
        if isinstance(module, (FSDPModule, FullyShardedDataParallel)):
            yield name


def _checkpointed(model: Module) -> Iterator[str]:
    """Yield the names of the modules whose activations are recomputed, by a wrapper or by transformers' attribute."""
    for name, module in model.named_modules():
        # fully_shard replaces the class by a subclass: FSDPCheckpointWrapper.
        if is_a(module, "CheckpointWrapper") or getattr(module, "gradient_checkpointing", False) is True:
            yield name


def compiled_modules(model: Module) -> Iterator[str]:
    """Yield the names of the modules that torch.compile wraps, or that were compiled in place."""
    # Compilation in place leaves only a private mark, ``_compiled_call_impl``; ``tests/launch/test_private_names.py`` fails
    # when it changes.
    for name, module in model.named_modules():
        if is_a(module, "OptimizedModule") or getattr(module, "_compiled_call_impl", None) is not None:
            yield name


def _is_te_linear(module: Module) -> bool:
    """Tell whether it is a linear layer of Transformer Engine, which need not be installed."""
    # ``in_features`` marks a linear layer. Its weight does not, because it may be a flat shard.
    return type(module).__module__.startswith("transformer_engine") and hasattr(module, "in_features")


def _graph_count() -> int:
    """Return how many graphs torch.compile has made in this process."""
    # A model can be wrapped by torch.compile and run uncompiled all the same. The counter is private;
    # ``tests/launch/test_private_names.py`` fails when it changes.
    if "torch._dynamo" not in sys.modules:
        return 0
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def _wrappers(model: Module) -> dict[str, int]:
    """Count the known wrappers; by class name where the wrapper's library need not be installed."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.nn.parallel import DistributedDataParallel

    counts: Counter[str] = Counter()
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            counts["DDP"] += 1
        elif isinstance(module, FullyShardedDataParallel):
            counts["FSDP1"] += 1
        elif isinstance(module, FSDPModule):
            counts["FSDP2"] += 1
        elif is_a(module, "DeepSpeedEngine"):
            counts["DeepSpeedEngine"] += 1
        if is_a(module, "OptimizedModule"):
            counts["OptimizedModule"] += 1
    return dict(counts)


def _zero_stage(model: Module) -> int | None:
    """Return the ZeRO stage of the DeepSpeed engine, which may be inside a wrapper; None without an engine."""
    for module in model.modules():
        stage = getattr(module, "zero_optimization_stage", None)
        if callable(stage):
            return int(stage())
    return None


def live_parameter_info(
    name: str, parameter: torch.Tensor, layouts: Mapping[int, Layout], held: int | None
) -> ParameterInfo:
    """Return what this rank stores of a live parameter.

    Args:
        name: Its live name.
        parameter: The parameter.
        layouts: The layouts of plain tensors that FSDP1, DDP and ZeRO hold, see ``layouts.wrapper_layouts``.
        held: How many of the optimizer's entries are this tensor.
    """
    from torch.distributed.fsdp import FlatParameter

    shape, kind, local = tuple(parameter.shape), "Tensor", parameter
    layout = layouts.get(id(parameter)) or layout_of(parameter)
    if hasattr(parameter, "ds_shape"):  # ZeRO-3: the parameter itself is empty between uses, its shard is beside it
        shape, kind, local = tuple(parameter.ds_shape), "ZeRO-3", zero3_shard(parameter)
    elif hasattr(parameter, "placements"):
        kind, local = "DTensor", local_of(parameter)
    elif isinstance(parameter, FlatParameter):  # which checks an attribute: its class is nn.Parameter
        kind = "FlatParameter"
    elif layout.flat:
        # With use_orig_params each parameter is a one-dimensional view of this rank's part of the flat one (maybe empty).
        kind = "FSDP1 shard"
    if cut := autotp_cut(parameter):
        shape = cut.shape
    return ParameterInfo(
        name=name,
        shape=shape,
        dtype=stored_dtype(local),
        trainable=parameter.requires_grad,
        kind=kind,
        layout=layout,
        local_numel=local.numel(),
        digest=digest(parameter if kind == "DTensor" else local),
        held=held,
    )
