"""Reader of models on a rank: unwrapped, then live.

- ``read_unwrapped`` reads a model that nothing wraps yet, as ``build_model`` of a driver (the class
  by which a trainer is tested) returns it. ``worker`` calls it before the trainer is built. Checks
  expect its names, shapes, dtypes and values of the trained model later.
- ``read_model`` reads the live model, as the trainer has wrapped it and as this rank stores it.
  ``snapshot`` calls it after each action (``build``, ``step``, ...).

A *block* is one of the equal modules of which a model is made, such as ``layers.0``: FSDP wraps
them one by one. A *live name* is a name in the wrapped model: ``module.layers.0.weight``. Of each
parameter are recorded, among others, a *digest* (a hash of the values that this rank has) and a
*layout* (which part of the whole tensor these are). No values are recorded. The classes of the
records, ``ParameterInfo`` and the like, explain each field (package ``trace``).
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from pytest_distcompat.probe.blocks import (
    declared_blocks,
    is_a,
    multiplies,
    named_blocks,
)
from pytest_distcompat.probe.deepspeed_shards import autotp_cut, named_parameters
from pytest_distcompat.probe.layouts import layout_of, wrapper_layouts
from pytest_distcompat.probe.tensors import (
    digest,
    digest_rounded,
    local_of,
    stored_dtype,
    zero3_shard,
)
from pytest_distcompat.probe.wrapped_optimizers import entries, master_copies
from pytest_distcompat.trace import STAGE, Layout, MeshDim, ModelInfo, ParameterInfo, UnwrappedInfo

if TYPE_CHECKING:
    from torch.nn import Module


def require_module(model: object, name: str, hint: str) -> None:
    """Raise TypeError if ``model`` is not a module.

    Args:
        model: What a driver returned.
        name: A noun for it in the message.
        hint: Where the driver returns it, for the end of the message.
    """
    if isinstance(model, torch.nn.Module):
        return
    description = f"a {type(model).__name__}: {model!r:.100}"
    if model is None:
        description = "None"
    raise TypeError(f"{name} is {description}; expected a torch.nn.Module, {hint}")


def read_unwrapped(
    model: Module,
    blocks: tuple[str, ...] = (),
    ignored_modules: tuple[str, ...] = (),
    obeyed: tuple[str, ...] = (),
    compute: str = "",
) -> UnwrappedInfo:
    """Return names, shapes, dtypes and digests of a model that nothing has wrapped.

    Args:
        model: The model.
        blocks: Class names of the modules to wrap one by one, ``("LlamaDecoderLayer",)``; empty for
            those that the model declares.
        ignored_modules: Names of the modules to leave out of the sharding.
        obeyed: The options of a cell that the driver supports, such as ``compile``; checks ask only
            for what these ask for.
        compute: The name of the dtype that the precision computes in, ``bfloat16``. Digests are
            also taken of the values rounded to it; empty for none.

    Raises:
        TypeError: If ``model`` is not a module.
    """
    require_module(model, "the unwrapped model", "which build_model() and reload() return")
    classes = blocks or declared_blocks(model)
    parameters: list[ParameterInfo] = []
    for name, parameter in model.named_parameters():
        info = parameter_info(name, parameter)
        rounded = digest_rounded(parameter, compute)
        parameters.append(replace(info, rounded=rounded))
    state_dict = tuple(model.state_dict())
    buffers: list[ParameterInfo] = []
    for name, buffer in model.named_buffers():
        info = parameter_info(name, buffer, persistent=name in state_dict)
        rounded = digest_rounded(buffer, compute)
        buffers.append(replace(info, rounded=rounded))
    return UnwrappedInfo(
        tuple(parameters),
        tuple(buffers),
        state_dict,
        tuple(tied_names(model)),
        blocks=named_blocks(model, classes),
        block_classes=classes,
        ignored_modules=ignored_modules,
        obeyed=obeyed,
        linears=_linear_count(model),
        # How many modules multiply by a matrix.
        products=sum(multiplies(module) for module in model.modules()),
        evaluating=_names_where(model, _is_evaluating),
        noncontiguous=_noncontiguous_names(model),
    )


def _is_evaluating(module: Module) -> bool:
    """Tell whether a module is in evaluation mode."""
    return not module.training


def _noncontiguous_names(model: Module) -> tuple[str, ...]:
    """Return the names of the parameters that are not contiguous, such as transposed ones."""
    names: list[str] = []
    for name, parameter in model.named_parameters():
        if not local_of(parameter).is_contiguous():
            names.append(name)
    return tuple(names)


def _linear_count(model: Module) -> int:
    """Return how many linear layers can be converted to float8.

    Its kernels need sizes that are divisible by 16.
    """
    count = 0
    for module in model.modules():
        if not isinstance(module, torch.nn.Linear):
            continue
        if module.in_features % 16 == 0 and module.out_features % 16 == 0:
            count += 1
    return count


def tied_names(model: Module) -> list[tuple[str, ...]]:
    """Return the groups of names that share one parameter, such as embedding and output layer."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    groups: list[tuple[str, ...]] = []
    for group in names.values():
        if len(group) > 1:
            groups.append(tuple(group))
    return groups


def parameter_info(name: str, tensor: torch.Tensor, *, persistent: bool = False) -> ParameterInfo:
    """Return the record of a parameter or buffer, with the layout that the tensor itself has.

    ``live_parameter_info`` is for parameters whose layout only their wrapper knows.
    """
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


def read_model(
    model: Module, optimizer: Any, trainer_world_size: int | None, pp_group: Any = None
) -> ModelInfo:
    """Return the wrappers of the live model, and its parameters as this rank stores them.

    Args:
        model: The trainer's model.
        optimizer: The trainer's optimizer, with its wrappers.
        trainer_world_size: The number of ranks that the trainer assumes; None if unknown.
        pp_group: The process group whose ranks hold the stages of one pipeline; None without
            pipeline parallelism.
    """
    from torch import distributed
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    zero_stage = _zero_stage(model)
    parameters = _live_parameters(model, optimizer, zero_stage)
    pp_ranks: tuple[int, ...] = ()
    if pp_group is not None:
        pp_ranks = tuple(distributed.get_process_group_ranks(pp_group))
        index = pp_ranks.index(distributed.get_rank())
        # No tensor says that it is in one stage of a pipeline only, so that is added here.
        # Name of the dimension, its size, this rank's coordinate, and what each rank has of it.
        stage = MeshDim("pp", len(pp_ranks), index, STAGE)
        parameters = [_with_outermost_dim(info, stage) for info in parameters]
    world_size = 1
    backend = ""
    if distributed.is_available() and distributed.is_initialized():
        world_size = distributed.get_world_size()
        backend = str(distributed.get_backend())
    if trainer_world_size is not None:
        # A trainer may have read the number from the environment, as a string.
        trainer_world_size = int(trainer_world_size)

    def is_unit(module: Module) -> bool:
        return isinstance(module, (FSDPModule, FullyShardedDataParallel))

    buffers: list[ParameterInfo] = []
    for name, buffer in model.named_buffers():
        buffers.append(parameter_info(name, buffer))
    return ModelInfo(
        type=type(model).__name__,
        wrappers=_wrappers(model),
        parameters=tuple(parameters),
        buffers=tuple(buffers),
        world_size=world_size,
        trainer_world_size=trainer_world_size,
        backend=backend,
        zero_stage=zero_stage,
        units=_names_where(model, is_unit),
        checkpointed=_names_where(model, _is_checkpointed),
        compiled=compiled_modules(model),
        float8=sum(_computes_in_8_bits(module) for module in model.modules()),
        graphs=_graph_count(),
        pp_ranks=pp_ranks,
    )


def _live_parameters(model: Module, optimizer: Any, zero_stage: int | None) -> list[ParameterInfo]:
    """Return each live parameter, and how often it is in the optimizer's param groups.

    That is 1, or 0 for a parameter that is not optimized. It is None under ZeRO, whose optimizer
    has flat copies in its groups instead.
    """
    layouts = wrapper_layouts(model)
    # ``id`` of a float32 copy that the optimizer updates -> the parameter.
    masters = master_copies(optimizer)
    entries_by_id: Counter[int] = Counter()
    for entry in entries(optimizer):
        # An entry may be the float32 copy of a parameter: then it counts for the parameter.
        parameter = masters.get(id(entry), entry)
        entries_by_id[id(parameter)] += 1
    infos: list[ParameterInfo] = []
    for name, parameter in named_parameters(model):
        entry_count = None if zero_stage else entries_by_id[id(parameter)]
        infos.append(live_parameter_info(name, parameter, layouts, held=entry_count))
    return infos


def _with_outermost_dim(info: ParameterInfo, dim: MeshDim) -> ParameterInfo:
    """Return the parameter with ``dim`` as the outermost dimension of its mesh."""
    layout = replace(info.layout, dims=(dim, *info.layout.dims))
    return replace(info, layout=layout)


def _names_where(model: Module, condition: Callable[[Module], bool]) -> tuple[str, ...]:
    """Return the names of the modules for which the condition is true; empty for the model itself.

    For the units of FSDP these are ``("", "layers.0", "layers.1")``.
    """
    names: list[str] = []
    for name, module in model.named_modules():
        if condition(module):
            names.append(name)
    return tuple(names)


def _computes_in_8_bits(module: Module) -> bool:
    """Tell whether the module is a float8 layer of torchao or Transformer Engine."""
    return "Float8" in type(module).__name__ or _is_te_linear(module)


def _is_checkpointed(module: Module) -> bool:
    """Tell whether the module's activations are checkpointed, by a wrapper or by transformers."""
    # fully_shard replaces the class by a subclass: FSDPCheckpointWrapper.
    return (
        is_a(module, "CheckpointWrapper")
        or getattr(module, "gradient_checkpointing", False) is True
        or _is_run_by_deepspeed(module)
    )


def _is_run_by_deepspeed(module: Module) -> bool:
    """Tell whether the module's ``forward`` was replaced by DeepSpeed's checkpointing.

    The replacement is an instance attribute, a ``functools.partial`` of
    ``deepspeed.checkpointing.checkpoint``.
    """
    function = getattr(vars(module).get("forward"), "func", None)
    library = "deepspeed.runtime.activation_checkpointing.checkpointing"
    return getattr(function, "__module__", "") == library


def compiled_modules(model: Module) -> tuple[str, ...]:
    """Return the names of the modules that torch.compile wraps, or that were compiled in place.

    In place means ``module.compile()``.
    """
    # Compilation in place leaves only a private mark, ``_compiled_call_impl``;
    # ``tests/launch/test_private_names.py`` fails when it changes.

    def is_compiled(module: Module) -> bool:
        return (
            is_a(module, "OptimizedModule")
            or getattr(module, "_compiled_call_impl", None) is not None
        )

    return _names_where(model, is_compiled)


def _is_te_linear(module: Module) -> bool:
    """Tell whether the module is a linear layer of Transformer Engine, installed or not."""
    # ``in_features`` marks a linear layer. Its weight does not, because it may be a flat shard.
    return type(module).__module__.startswith("transformer_engine") and hasattr(
        module, "in_features"
    )


def _graph_count() -> int:
    """Return how many graphs torch.compile has made in this process."""
    # A model can be wrapped by torch.compile and run uncompiled all the same. The counter is
    # private; ``tests/launch/test_private_names.py`` fails when it changes.
    if "torch._dynamo" not in sys.modules:
        return 0
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def _wrappers(model: Module) -> dict[str, int]:
    """Return how many modules are each known wrapper: ``{"FSDP2": 3}``.

    Those whose library may not be installed or loaded are known by the name of their class.
    """
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.nn.parallel import DistributedDataParallel

    kinds = {"DDP": DistributedDataParallel, "FSDP1": FullyShardedDataParallel, "FSDP2": FSDPModule}
    counts: Counter[str] = Counter()
    for module in model.modules():
        for name, kind in kinds.items():
            if isinstance(module, kind):
                counts[name] += 1
        for name in ("DeepSpeedEngine", "OptimizedModule"):
            if is_a(module, name):
                counts[name] += 1
    return dict(counts)


def _zero_stage(model: Module) -> int | None:
    """Return the ZeRO stage of the DeepSpeed engine; None without an engine."""
    # The engine may be inside a wrapper.
    for module in model.modules():
        stage = getattr(module, "zero_optimization_stage", None)
        if callable(stage):
            return int(stage())
    return None


def live_parameter_info(
    name: str,
    parameter: torch.Tensor,
    layouts: Mapping[int, Layout],
    held: int | None,
) -> ParameterInfo:
    """Return what this rank stores of a live parameter.

    Args:
        name: Its live name.
        parameter: The parameter.
        layouts: The layouts, by ``id``, of tensors whose layout only their wrapper knows (FSDP1,
            DDP, ZeRO): ``layouts.wrapper_layouts``.
        held: How many entries of the optimizer's groups are this tensor, see
            ``ParameterInfo.held``; None if that is unknown.
    """
    from torch.distributed.fsdp import FlatParameter

    shape = tuple(parameter.shape)
    kind = "Tensor"
    # What this rank stores of it.
    local = parameter
    layout = layouts.get(id(parameter)) or layout_of(parameter)
    if hasattr(parameter, "ds_shape"):
        # ZeRO-3 empties the parameter between uses, and keeps its shard in an attribute.
        shape = tuple(parameter.ds_shape)
        kind = "ZeRO-3"
        local = zero3_shard(parameter)
    elif hasattr(parameter, "placements"):
        kind = "DTensor"
        local = local_of(parameter)
    elif isinstance(parameter, FlatParameter):
        # The class is nn.Parameter all the same: FlatParameter's metaclass looks for an attribute.
        kind = "FlatParameter"
    elif layout.flat:
        # With use_orig_params each parameter is a one-dimensional view, maybe empty, into this
        # rank's shard of the flat parameter.
        kind = "FSDP1 shard"
    digested = local
    if kind == "DTensor":
        # Its digest needs to know where the shard begins in the full tensor, which it says itself.
        digested = parameter
    # DeepSpeed's tensor parallelism: the parameter is a shard, and the full shape is noted in it.
    tensor_parallel_shard = autotp_cut(parameter)
    if tensor_parallel_shard:
        shape = tensor_parallel_shard.shape
    return ParameterInfo(
        name=name,
        shape=shape,
        dtype=stored_dtype(local),
        trainable=parameter.requires_grad,
        kind=kind,
        layout=layout,
        local_numel=local.numel(),
        digest=digest(digested),
        held=held,
    )
