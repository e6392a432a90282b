"""Reader of models: unwrapped, as the expected state, also once parts were wrapped, and as the trainer has wrapped them."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from pytest_distcompat.probe.blocks import declared_blocks, is_a, join, multiplies, named_blocks, unwrapped
from pytest_distcompat.probe.layouts import autotp_cut, layout_of, named_parameters, wrapper_layouts
from pytest_distcompat.probe.optimizer import entries, master_copies
from pytest_distcompat.probe.tensors import digest, digest_rounded, dtype_name, local_of, stored_dtype, zero3_shard
from pytest_distcompat.trace import STAGE, Layout, MeshDim, ModelInfo, ParameterInfo, UnwrappedInfo

if TYPE_CHECKING:
    from torch.nn import Module


def require_module(model: object, name: str, hint: str) -> None:
    """Raise TypeError if ``model`` is not a module, with ``name`` and a ``hint`` that the author of a driver understands."""
    if not isinstance(model, torch.nn.Module):
        description = f"{model!r:.100}" if model is None else f"a {type(model).__name__}: {model!r:.100}"
        raise TypeError(f"{name} is {description}; expected a torch.nn.Module, {hint}")


def read_unwrapped(
    model: Module,
    blocks: tuple[str, ...] = (),
    ignored_modules: tuple[str, ...] = (),
    obeyed: tuple[str, ...] = (),
    compute: str = "",
) -> UnwrappedInfo:
    """Return names, shapes, dtypes and digests of a model that nothing has wrapped, and its groups of tied names.

    Without ``blocks`` the blocks are those that the model declares. Values are also digested as the dtype ``compute`` rounds
    them. Raises TypeError if ``model`` is not a module.
    """
    require_module(model, "the unwrapped model", "which build_model() and reload() return")
    classes = blocks or declared_blocks(model)
    parameters = tuple(
        replace(parameter_info(name, parameter), rounded=digest_rounded(parameter, compute))
        for name, parameter in model.named_parameters()
    )
    state_dict = tuple(model.state_dict())
    buffers = tuple(
        replace(parameter_info(name, buffer, persistent=name in state_dict), rounded=digest_rounded(buffer, compute))
        for name, buffer in model.named_buffers()
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
        # Products in 8 bits need sizes that are divisible by 16.
        linears=sum(
            isinstance(module, torch.nn.Linear) and not (module.in_features % 16 or module.out_features % 16)
            for module in model.modules()
        ),
        products=sum(multiplies(module) for module in model.modules()),
        evaluating=tuple(name for name, module in model.named_modules() if not module.training),
        noncontiguous=tuple(name for name, one in model.named_parameters() if not local_of(one).is_contiguous()),
    )


def tied_names(model: Module) -> list[tuple[str, ...]]:
    """Return the names of each parameter that has several."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    return [tuple(group) for group in names.values() if len(group) > 1]


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
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    zero_stage, layouts, masters = _zero_stage(model), wrapper_layouts(model), master_copies(optimizer)
    held = Counter(id(masters.get(id(p), p)) for p in entries(optimizer))
    parameters = tuple(
        live_parameter_info(name, parameter, layouts, held=None if zero_stage else held[id(parameter)])
        for name, parameter in named_parameters(model)
    )
    pp_ranks = tuple(distributed.get_process_group_ranks(pp_group)) if pp_group is not None else ()
    if pp_ranks:
        stage = MeshDim("pp", len(pp_ranks), pp_ranks.index(distributed.get_rank()), STAGE)
        parameters = tuple(
            replace(info, layout=replace(info.layout, dims=(stage, *info.layout.dims))) for info in parameters
        )
    ready = distributed.is_available() and distributed.is_initialized()
    return ModelInfo(
        type=type(model).__name__,
        wrappers=_wrappers(model),
        parameters=parameters,
        buffers=tuple(parameter_info(name, buffer) for name, buffer in model.named_buffers()),
        world_size=distributed.get_world_size() if ready else 1,
        # A trainer may have it as a string, from the environment.
        trainer_world_size=None if trainer_world_size is None else int(trainer_world_size),
        backend=str(distributed.get_backend()) if ready else "",
        zero_stage=zero_stage,
        units=_named(model, lambda module: isinstance(module, (FSDPModule, FullyShardedDataParallel))),
        checkpointed=_named(model, _is_checkpointed),
        compiled=compiled_modules(model),
        float8=sum("Float8" in type(module).__name__ or _is_te_linear(module) for module in model.modules()),
        graphs=_graph_count(),
        pp_ranks=pp_ranks,
    )


def _named(model: Module, fits: Callable[[Module], bool]) -> tuple[str, ...]:
    return tuple(name for name, module in model.named_modules() if fits(module))


def _is_checkpointed(module: Module) -> bool:
    """Tell whether the module's activations are recomputed, by a wrapper or by transformers' attribute."""
    # fully_shard replaces the class by a subclass: FSDPCheckpointWrapper.
    return is_a(module, "CheckpointWrapper") or getattr(module, "gradient_checkpointing", False) is True


def compiled_modules(model: Module) -> tuple[str, ...]:
    """Return the names of the modules that torch.compile wraps, or that were compiled in place."""
    # Compilation in place leaves only a private mark, ``_compiled_call_impl``; ``tests/launch/test_private_names.py`` fails
    # when it changes.
    return _named(
        model, lambda one: is_a(one, "OptimizedModule") or getattr(one, "_compiled_call_impl", None) is not None
    )


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

    kinds = {"DDP": DistributedDataParallel, "FSDP1": FullyShardedDataParallel, "FSDP2": FSDPModule}
    counts: Counter[str] = Counter()
    for module in model.modules():
        counts.update(name for name, kind in kinds.items() if isinstance(module, kind))
        counts.update(name for name in ("DeepSpeedEngine", "OptimizedModule") if is_a(module, name))
    return dict(counts)


def _zero_stage(model: Module) -> int | None:
    """Return the ZeRO stage of the DeepSpeed engine, which may be inside a wrapper; None without an engine."""
    stages = (getattr(module, "zero_optimization_stage", None) for module in model.modules())
    return next((int(stage()) for stage in stages if callable(stage)), None)


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


def read_parts(model: Module, known: Mapping[int, UnwrappedInfo], blocks: tuple[str, ...] = ()) -> UnwrappedInfo:
    """Return the unwrapped model, taking parts that were wrapped since from ``known``, by the ``id`` of the module."""
    # ``fully_shard`` is called for blocks before it is called for the root, and FSDP1 may be too.
    if not any(id(part) in known for part in model.modules()):
        return _partitioned(model, read_unwrapped(model, blocks))
    read: list[tuple[str, UnwrappedInfo]] = []
    for name, part in _parts(model, "", known):
        above = any(id(module) in known for module in part.modules())
        read.append((name, known.get(id(part)) or (_read_without_children(part) if above else read_unwrapped(part))))
    tied, classes = tied_names(model), blocks or declared_blocks(model)
    duplicates = {name for group in tied for name in group[1:]}
    parameters = (_under(name, one) for name, info in read for one in info.parameters)
    inside = [tuple(join(name, one) for one in group) for name, info in read for group in info.tied]
    return UnwrappedInfo(
        tuple(info for info in parameters if info.name not in duplicates),
        tuple(_under(name, one) for name, info in read for one in info.buffers),
        tuple(join(name, key) for name, info in read for key in info.state_dict),
        (*inside, *(group for group in tied if group not in inside)),
        blocks=named_blocks(model, classes),
        block_classes=classes,
        linears=sum(info.linears for _, info in read),
        products=sum(info.products or 0 for _, info in read),
    )


def _parts(module: Module, name: str, known: Mapping[int, UnwrappedInfo]) -> Iterator[tuple[str, Module]]:
    """Yield the largest modules that are known or hold no known module, and the modules above those."""
    module = unwrapped(module)
    yield name, module
    if id(module) not in known and any(id(part) in known for part in module.modules()):
        for child, part in module.named_children():
            yield from _parts(part, join(name, child), known)


def _read_without_children(module: Module) -> UnwrappedInfo:
    """Return the parameters and buffers of the module itself, without those of its children."""
    parameters = tuple(parameter_info(name, one) for name, one in module.named_parameters(recurse=False))
    not_saved = _not_saved(module)
    buffers = tuple(
        parameter_info(name, one, persistent=name not in not_saved) for name, one in module.named_buffers(recurse=False)
    )
    return UnwrappedInfo(
        parameters, buffers, tuple(info.name for info in (*parameters, *buffers) if info.name not in not_saved)
    )


def _not_saved(module: Module) -> Collection[str]:
    """Return the names of the module's own buffers that its state dict leaves out."""
    # Comparing with ``state_dict()`` is no alternative, because it lets wrapped children gather theirs in a collective. The
    # attribute is private; ``tests/launch/test_private_names.py`` fails when it changes.
    return module._non_persistent_buffers_set  # noqa: SLF001 - see above


def _under(prefix: str, info: ParameterInfo) -> ParameterInfo:
    return replace(info, name=join(prefix, info.name))


def _partitioned(model: Module, unwrapped: UnwrappedInfo) -> UnwrappedInfo:
    """Return ``unwrapped`` with the full shapes of parameters that ``deepspeed.zero.Init`` partitioned when it made them."""
    partitioned: dict[str, Any] = {name: p for name, p in model.named_parameters() if hasattr(p, "ds_shape")}

    def whole(info: ParameterInfo) -> ParameterInfo:
        if (p := partitioned.get(info.name)) is None:
            return info
        shape, dtype = tuple(p.ds_shape), dtype_name(p.dtype)
        return replace(info, shape=shape, local_numel=int(p.ds_numel), dtype=dtype, digest="")

    return replace(unwrapped, parameters=tuple(map(whole, unwrapped.parameters)))
