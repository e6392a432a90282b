"""Reader of optimizers, of the gradients that they get, and of learning rate schedulers.

A trainer's optimizer is a torch optimizer in any number of wrappers, or several of those. The torch
optimizer updates one of:

- the live parameters, those of the model as the trainer has wrapped it;
- master copies of them in float32, a tensor for each (DeepSpeed without ZeRO);
- flat partitions (ZeRO): one tensor with this rank's part of the masters of many parameters. What a
  partition has of one parameter is a fragment, a view of it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from pytest_distcompat.probe.layouts import (
    WHOLE,
    Expert,
    autotp_cut,
    layout_of,
    moe_experts,
    named_parameters,
    partition_layout,
    starts_of,
    wrapper_layouts,
)
from pytest_distcompat.probe.tensors import (
    digest,
    dtype_name,
    local_of,
    stored_dtype,
    stored_parts,
    valueless,
    zero3_shard,
)
from pytest_distcompat.trace import GradientInfo, Layout, OptimizerInfo, StateInfo, together

if TYPE_CHECKING:
    from torch.nn import Module


def several(optimizer: Any) -> list[Any]:
    """Return the trainer's optimizers or schedulers as a list, empty for None.

    A trainer may have several: ``torch.optim.Muon`` needs a second optimizer for parameters that
    are no matrices.

    Args:
        optimizer: An optimizer or scheduler, an iterable of them, or None.
    """
    if optimizer is None:
        return []
    if isinstance(optimizer, Iterable) and not isinstance(optimizer, str):
        return list(optimizer)
    return [optimizer]


def entries(optimizer: Any) -> list[torch.Tensor]:
    """Return the parameters of all the optimizers, in the order of their groups."""
    parameters: list[torch.Tensor] = []
    for wrapped in several(optimizer):
        for group in torch_optimizer(wrapped).param_groups:
            parameters.extend(group["params"])
    return parameters


def chain(optimizer: Any) -> list[Any]:
    """Return an optimizer's wrappers, the outermost first, and at the end the torch optimizer."""
    # AcceleratedOptimizer, DeepSpeedOptimizerWrapper and DeepSpeed's ZeRO optimizers all have the
    # inner one as ``.optimizer``.
    wrappers = [optimizer]
    while True:
        inner = getattr(wrappers[-1], "optimizer", None)
        if inner is None or inner in wrappers:
            return wrappers
        wrappers.append(inner)


def _delegate(optimizer: Any) -> Any:
    """Return the optimizer that a torch optimizer delegates its step to, or the same optimizer."""
    # ZeroRedundancyOptimizer's ``optim`` holds this rank's parameters and their state; its own
    # state is what was loaded.
    inner = getattr(optimizer, "optim", None)
    if isinstance(inner, torch.optim.Optimizer):
        return inner
    return optimizer


def links(optimizer: Any) -> Iterator[Any]:
    """Yield the wrappers and the torch optimizer of each of the trainer's optimizers."""
    for wrapped in several(optimizer):
        yield from chain(wrapped)


def torch_optimizer(optimizer: Any) -> Any:
    """Return the torch optimizer inside all wrappers; None for None."""
    if optimizer is None:
        return None
    return chain(optimizer)[-1]


def master_copies(optimizer: Any) -> dict[int, torch.Tensor]:
    """Map the ``id`` of each float32 master copy to its parameter in low precision.

    DeepSpeed has such copies where it runs without ZeRO (``FP16_UnfusedOptimizer``).
    """
    # They are in two lists that are not documented; ``tests/launch/test_private_names.py`` fails
    # when they change.
    for link in links(optimizer):
        low_precision_groups = getattr(link, "fp16_groups", None)
        master_groups = getattr(link, "fp32_groups", None)
        if low_precision_groups and master_groups:
            return _paired(low_precision_groups, master_groups)
    return {}


def _paired(low_precision_groups: Any, master_groups: Any) -> dict[int, torch.Tensor]:
    """Map the ``id`` of each master to the parameter at the same place of the same group."""
    parameter_by_master: dict[int, torch.Tensor] = {}
    for parameters, masters in zip(low_precision_groups, master_groups, strict=True):
        for parameter, master in zip(parameters, masters, strict=True):
            parameter_by_master[id(master)] = parameter
    return parameter_by_master


def owner_names(model: Module, optimizer: Any) -> dict[int, str]:
    """Map the ``id`` of each live parameter, and of each of its master copies, to its name."""
    names: dict[int, str] = {}
    for name, parameter in named_parameters(model):
        names[id(parameter)] = name
    copies: dict[int, str] = {}
    for copy_id, parameter in master_copies(optimizer).items():
        if id(parameter) in names:
            copies[copy_id] = names[id(parameter)]
    return names | copies


def read_optimizer(
    model: Module,
    optimizer: Any,
    *,
    whole: bool = True,
    without_gradient: frozenset[int] = frozenset(),
) -> OptimizerInfo:
    """Return the parameters that the optimizer holds, and every tensor of its state.

    Several optimizers of a trainer count as one. The function does not call
    ``get_optimizer_state_dict``, which takes a step on a fresh optimizer
    (https://github.com/pytorch/pytorch/pull/125708).

    Args:
        model: The trainer's model.
        optimizer: The trainer's optimizer, with its wrappers; of several a list.
        whole: Whether state is read; otherwise only class names and the numbers of the parameter
            groups are.
        without_gradient: The ``id`` of each tensor that the optimizer stepped on without a
            gradient.

    Raises:
        TypeError: If one of the optimizers has no ``param_groups``.
    """
    chains = [chain(wrapped) for wrapped in several(optimizer)]
    stepping: list[Any] = []
    groups: list[dict[str, float]] = []
    for wrappers in chains:
        torch_optim = wrappers[-1]
        _require_param_groups(torch_optim)
        stepping.append(_delegate(torch_optim))
        for group in torch_optim.param_groups:
            groups.append(numbers_of(group))
    type_names = _type_names(chains, stepping)
    if not whole:
        return OptimizerInfo(type_names, 0, param_groups=tuple(groups))
    owners = owner_names(model, optimizer)
    optimized = entries(optimizer)
    partitioned = _partitioned(model)
    layouts = wrapper_layouts(model)
    partition = partition_layout(model, layouts)
    foreign = 0
    if not partitioned:
        # DeepSpeed's flat partitions are no parameters of the model either, so there an entry's
        # parameter is not known by identity.
        foreign = sum(id(parameter) not in owners for parameter in optimized)
    masters: tuple[StateInfo, ...] = ()
    if stepping:
        # Only DeepSpeed has masters, and its engine has one optimizer.
        masters = tuple(_masters(model, stepping[0], partition))
    states = _states(
        model, optimizer, stepping, owners=owners, layouts=layouts, partition=partition
    )
    known_without_gradient = without_gradient & owners.keys()
    names_without_gradient = sorted(owners[tensor_id] for tensor_id in known_without_gradient)
    return OptimizerInfo(
        chain=type_names,
        entries=len(optimized),
        foreign=foreign,
        states=tuple(states),
        partitioned=partitioned,
        masters=masters,
        accumulates=_accumulation_dtype(optimizer),
        param_groups=tuple(groups),
        without_gradient=tuple(names_without_gradient),
    )


def _require_param_groups(optimizer: Any) -> None:
    """Raise TypeError if it is no torch optimizer."""
    if not hasattr(optimizer, "param_groups"):
        hint = (
            "self.optimizer of the driver is to be the optimizer that steps, or what wraps it; "
            "of several, a list"
        )
        raise TypeError(f"{type(optimizer).__name__} has no param_groups: {hint}")


def _type_names(chains: list[list[Any]], stepping: list[Any]) -> tuple[str, ...]:
    """Return the class names from the outermost wrapper to the optimizer that steps.

    Those of several optimizers are one text: ``AcceleratedOptimizer > Muon + AdamW``.

    Args:
        chains: For each optimizer its ``chain``.
        stepping: For each optimizer the torch optimizer that steps.
    """
    names_by_chain: list[list[str]] = []
    for wrappers, delegate in zip(chains, stepping, strict=True):
        distinct = dict.fromkeys([*wrappers, delegate])
        names = [type(link).__name__ for link in distinct]
        names_by_chain.append(names)
    if len(names_by_chain) == 1:
        return tuple(names_by_chain[0])
    chain_texts = [" > ".join(names) for names in names_by_chain]
    return (" + ".join(chain_texts),)


def _states(
    model: Module,
    optimizer: Any,
    stepping: list[Any],
    *,
    owners: Mapping[int, str],
    layouts: Mapping[int, Layout],
    partition: Layout,
) -> Iterator[StateInfo]:
    """Yield every tensor of the optimizers' state, and the master copies that they update.

    Args:
        model: The trainer's model.
        optimizer: The trainer's optimizer, with its wrappers.
        stepping: The torch optimizers whose state it is.
        owners: The ``owner_names`` of the two.
        layouts: The ``wrapper_layouts`` of the model.
        partition: The ``partition_layout`` of the model.
    """
    live = {id(parameter) for parameter in model.parameters()}
    low_precision = master_copies(optimizer)
    number = 0
    for torch_optim in stepping:
        for parameter, state in torch_optim.state.items():
            owner = owners.get(id(parameter), f"partition {number}")
            original = low_precision.get(id(parameter), parameter)
            # For a plain tensor that no wrapper holds: a parameter is whole on each rank, anything
            # else is a flat partition.
            plain_layout = WHOLE if id(parameter) in owners else partition
            layout = layouts.get(id(original)) or layout_of(parameter, plain_layout)
            if id(parameter) not in live:
                yield _state(owner, "master", parameter, layout, starts_of(original))
            yield from _states_of_parameter(owner, state, layout, original)
            number += 1


def numbers_of(group: dict[str, Any]) -> dict[str, float]:
    """Return the hyperparameters of a parameter group that are numbers.

    Those of a tuple are single numbers: ``betas.0`` and ``betas.1``.
    """
    numbers: dict[str, float] = {}
    for key, value in group.items():
        if key == "params":
            continue
        if isinstance(value, (tuple, list)):
            for index, element in enumerate(value):
                if _is_number(element):
                    numbers[f"{key}.{index}"] = float(element)
        elif _is_number(value):
            numbers[key] = float(value)
    return numbers


def _is_number(value: Any) -> bool:
    if isinstance(value, bool):
        return False
    return isinstance(value, (torch.Tensor, int, float))


def _states_of_parameter(
    owner: str,
    state: Mapping[str, Any],
    layout: Layout,
    parameter: torch.Tensor,
) -> Iterator[StateInfo]:
    """Yield the state of a parameter, or of its master copy.

    Args:
        owner: The name of the parameter.
        state: Its state in the optimizer, by key.
        layout: Its layout.
        parameter: The live parameter.
    """
    for key, value in state.items():
        if not _is_number(value):
            continue
        starts: torch.Tensor | None = None
        if _is_elementwise(value, parameter):
            starts = starts_of(parameter)
        yield _state(owner, key, value, layout, starts)


def _is_elementwise(value: Any, parameter: torch.Tensor) -> bool:
    """Tell whether a state is a plain tensor of the shape of the parameter's local part."""
    # The optimizer may have made it of the local part of a DTensor. A step count has no dimension.
    if not isinstance(value, torch.Tensor):
        return False
    if hasattr(value, "placements") or valueless(value):
        return False
    return value.shape == local_of(parameter).shape


def _state(
    owner: str,
    key: str,
    value: Any,
    layout: Layout,
    starts: torch.Tensor | None = None,
) -> StateInfo:
    """Return one entry of the state.

    Args:
        owner: The name of the parameter or partition that it belongs to.
        key: Its key, such as ``exp_avg``.
        value: A tensor or a number.
        layout: That of the owner; the entry has it too, unless it is a step count or a DTensor.
        starts: Where its runs start in the flattened whole (``layouts.starts_of``).
    """
    if not isinstance(value, torch.Tensor):
        return StateInfo(owner, key, type(value).__name__, 1, digest(value))
    if key == "step":
        layout = WHOLE
    return StateInfo(
        owner,
        key,
        stored_dtype(value),
        local_of(value).numel(),
        digest(value, starts),
        layout_of(value, layout),
        nbytes=sum(part.nbytes for part in stored_parts(value)),
    )


def _partitioned(model: Module) -> dict[str, int]:
    """Return how many elements of each live parameter this rank's flat masters hold.

    Only DeepSpeed has such masters; for another trainer the result is empty.
    """
    # ZeRO-3 has ``safe_get_local_fp32_param`` and the public ``ds_tensor`` and ``ds_numel`` for it.
    # ZeRO-1 and 2 have only the private ``_hp_mapping``: the public accessors
    # (``deepspeed.utils.safe_get_full_fp32_param``) take part in an all_reduce, which a probe must
    # not, and always return float32. ``tests/launch/test_private_names.py`` fails when it changes.
    numel_by_id: dict[int, int] = {}
    for flat_master in flat_masters(model):
        numel_by_id[id(flat_master.parameter)] = flat_master.master.numel()
    partitioned: dict[str, int] = {}
    for name, parameter in named_parameters(model):
        has_partition = hasattr(parameter, "ds_tensor") or hasattr(parameter, "_hp_mapping")
        if parameter.requires_grad and has_partition:
            partitioned[name] = numel_by_id.get(id(parameter), 0)
    return partitioned


def _accumulation_dtype(optimizer: Any) -> str:
    """Return the dtype in which DeepSpeed accumulates gradients; empty without DeepSpeed."""
    # The attributes are private; ``tests/launch/test_private_names.py`` fails when they change.
    for link in links(optimizer):
        for name in ("gradient_accumulation_dtype", "grad_acc_dtype"):
            dtype = getattr(link, name, None)
            if isinstance(dtype, torch.dtype):
                return dtype_name(dtype)
    return ""


def _masters(model: Module, inner: Any, layout: Layout) -> Iterator[StateInfo]:
    """Yield this rank's part of each parameter's flat master and moments (see ``_partitioned``).

    Args:
        model: The trainer's model.
        inner: The torch optimizer.
        layout: That of the partition of what is no expert.
    """
    keys = _moment_keys(inner)
    experts = moe_experts(model)
    for name, parameter, master in flat_masters(model):
        layout_of_part, starts = fragment_place(parameter, layout, experts)
        yield _state(name, "master", master, layout_of_part, starts)
        if hasattr(parameter, "ds_tensor"):
            moments = _zero3_moments(parameter, keys, master.numel())
        else:
            moments = _zero12_moments(parameter, inner)
        for key, moment in moments:
            yield _state(name, key, moment, layout_of_part, starts)


def _moment_keys(optimizer: Any) -> set[str]:
    """Return the keys of the optimizer's state that are flat tensors, such as ``exp_avg``."""
    keys: set[str] = set()
    for state in optimizer.state.values():
        for key, value in state.items():
            if _is_flat(value):
                keys.add(key)
    return keys


#: The key of a moment in the optimizer's state, and this rank's part of the moment.
_Moment = tuple[str, torch.Tensor]


def _zero3_moments(parameter: Any, keys: Iterable[str], numel: int) -> Iterator[_Moment]:
    """Yield this rank's part of each moment of a ZeRO-3 parameter.

    Args:
        parameter: The parameter.
        keys: The ``_moment_keys`` of the optimizer.
        numel: How many elements this rank has of the parameter; padding may follow them.
    """
    from deepspeed.utils import safe_get_local_optimizer_state

    for key in sorted(keys):
        # A partition may have no state before its first step.
        with contextlib.suppress(KeyError):
            state = safe_get_local_optimizer_state(parameter, key)
            yield key, state.reshape(-1)[:numel]


def _zero12_moments(parameter: Any, inner: Any) -> Iterator[_Moment]:
    """Yield this rank's part of each moment of a ZeRO-1 or ZeRO-2 parameter."""
    mapping = parameter._hp_mapping  # noqa: SLF001 - see ``_partitioned``
    fragment = mapping.hp_fragment_address
    # Not ``mapping.optim_fragment``: after a load it is stale until the next step.
    for partition in inner.param_groups[mapping.param_group_index]["params"]:
        for key, value in inner.state.get(partition, {}).items():
            if _is_flat(value):
                yield key, value.narrow(0, fragment.start, fragment.numel)


class FlatMaster(NamedTuple):
    """The master of a live parameter in a flat partition of DeepSpeed.

    Attributes:
        name: The name of the parameter.
        parameter: The parameter.
        master: This rank's part of the master, a view of the partition (see ``_partitioned``).
    """

    name: str
    parameter: Any
    master: torch.Tensor


def flat_masters(model: Module) -> Iterator[FlatMaster]:
    """Yield the flat masters of which this rank has a part."""
    for name, parameter in named_parameters(model):
        if hasattr(parameter, "ds_tensor"):
            master = _zero3_master(parameter)
            if master is not None:
                numel = zero3_shard(parameter).numel()
                yield FlatMaster(name, parameter, master.reshape(-1)[:numel])
            continue
        mapping = getattr(parameter, "_hp_mapping", None)
        if mapping is not None:
            yield FlatMaster(name, parameter, mapping.hp_fragment)


def fragment_place(
    parameter: Any, layout: Layout, experts: Mapping[int, Expert]
) -> tuple[Layout, torch.Tensor | None]:
    """Return the layout of this rank's part of a master, and the starts of its runs.

    The starts are None if they follow from the layout.

    Args:
        parameter: One that has a part in this rank's flat partition.
        layout: That of the partition of what is no expert.
        experts: The ``moe_experts`` of the model.
    """
    expert = experts.get(id(parameter))
    if expert is not None:
        from torch import distributed

        return expert.layout(distributed.get_rank(), flat=True), None
    cut = autotp_cut(parameter)
    if cut is None:
        return layout, None
    address = parameter._hp_mapping.lp_fragment_address  # noqa: SLF001 - see ``_partitioned``
    return cut.layout(layout), cut.starts(address.start, address.numel)


def _is_flat(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 1


def _zero3_master(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return this rank's part of a ZeRO-3 parameter's master.

    The result is None for a parameter that is partitioned and not optimized.
    """
    from deepspeed.utils import safe_get_local_fp32_param

    try:
        master: torch.Tensor | None = safe_get_local_fp32_param(parameter)
        if master is None:
            return None
        return _in_zero3_partition(parameter, master)
    except (KeyError, AttributeError):
        return None


def _in_zero3_partition(parameter: Any, master: torch.Tensor) -> torch.Tensor:
    """Return a master as a view of its flat partition, on whatever device that is.

    A master that is swapped out to a disk is returned as it is given.
    """
    # Of a partition that is offloaded to the CPU DeepSpeed's public accessor returns a copy on the
    # GPU (``DeepSpeedZeroOptimizer_Stage3.get_local_fp32_param``), and only a view leads to the
    # gradient. The attributes are private: ``tests/launch/test_private_names.py`` fails when they
    # go away.
    optimizer = parameter._z3_optimizer  # noqa: SLF001 - see above
    parameter_id = optimizer.get_param_id(parameter)
    group, start, length = optimizer.grad_position[parameter_id]
    partition: torch.Tensor = optimizer.fp32_partitioned_groups_flat[group]
    if start + length > partition.numel():
        return master
    return partition.narrow(0, start, length)


def read_scheduler(scheduler: Any) -> str:
    """Return a digest of the state and learning rates of each scheduler; empty for None.

    Raises:
        TypeError: If the driver's ``scheduler`` is something else.
    """
    texts = [_read_scheduler(single) for single in several(scheduler)]
    return "; ".join(texts)


def _read_scheduler(scheduler: Any) -> str:
    """Return a digest of the state and learning rates of one scheduler."""
    if hasattr(scheduler, "state_dict"):
        attributes = dict(scheduler.state_dict())
    elif hasattr(scheduler, "__dict__"):
        attributes = dict(vars(scheduler))
    else:
        type_name = type(scheduler).__name__
        description = f"self.scheduler of the driver is a {type_name}: {scheduler!r:.100}"
        raise TypeError(f"{description}; expected the scheduler, None, or of several a list")
    # A scheduler counts its calls since it was made; that count is no state of training.
    attributes.pop("_step_count", None)
    plain_types = (int, float, list, str)
    state = {key: value for key, value in attributes.items() if isinstance(value, plain_types)}
    text = json.dumps(state, sort_keys=True, default=repr)
    rates: Any = None
    # A user's own scheduler may lack this method, and DeepSpeed's OneCycle raises before its first
    # step.
    with contextlib.suppress(AttributeError, AssertionError):
        rates = scheduler.get_last_lr()
    last_epoch = state.get("last_epoch")
    digest_of_state = hashlib.sha256(text.encode()).hexdigest()
    return f"last_epoch={last_epoch} lr={rates} {digest_of_state[:12]}"


def square_of(gradient: torch.Tensor) -> float:
    """Return the sum of the squares of this rank's elements, in float64.

    It is 0 for a gradient without values, see ``tensors.valueless``.
    """
    local = local_of(gradient)
    if valueless(local):
        return 0.0
    return float(local.double().square().sum())


class StepGradients(NamedTuple):
    """The gradients of one optimizer's step, as fields of a ``StepInfo``.

    Attributes:
        square: This rank's share of the sum of the squares of all gradients.
        holders: The ranks whose shares add up to that sum.
        gradients: The gradient of each parameter.
    """

    square: float
    holders: tuple[int, ...]
    gradients: tuple[GradientInfo, ...]


def read_gradients(
    model: Module | None,
    optimizer: Any,
    tensors: Mapping[torch.Tensor, int],
    *,
    single: bool,
) -> StepGradients:
    """Read the gradients that an optimizer is about to step on, after unscaling and clipping.

    Args:
        model: The trainer's model; None if it is not known.
        optimizer: The trainer's optimizer, with its wrappers.
        tensors: What the torch optimizer is about to update, each with the number of its parameter
            group.
        single: Whether the gradients of single parameters are returned too.
    """
    names = {} if model is None else owner_names(model, optimizer)
    layouts = wrapper_layouts(model)
    copies = master_copies(optimizer)
    layout_of_partition = partition_layout(model, layouts)
    gradients: list[GradientInfo] = []
    partitions: dict[int, _FlatPartition] = {}
    # For each gradient the ranks that hold it together, and the sum of this rank's squares.
    squares: list[tuple[tuple[int, ...], float]] = []
    for tensor, group in tensors.items():
        if tensor.grad is None:
            continue
        is_partition = bool(names) and id(tensor) not in names
        original = copies.get(id(tensor), tensor)
        plain_layout = layout_of_partition if is_partition else WHOLE
        layout = layouts.get(id(original)) or layout_of(tensor, plain_layout)
        # A parameter that is a shard may have the gradient of the whole.
        layout = layout_of(tensor.grad, layout)
        square = square_of(tensor.grad)
        squares.append((layout.holders, square))
        if is_partition:
            storage = _storage_of(local_of(tensor))
            partitions[storage] = _FlatPartition(tensor, group)
        elif names:
            name = names[id(tensor)]
            numel = local_of(tensor.grad).numel()
            gradients.append(GradientInfo(name, numel, square, layout, group))
    if model is not None and partitions and (single or _has_layouts_of_its_own(model)):
        fragments = list(_gradients_of_fragments(model, partitions, layout_of_partition))
        gradients += fragments
        if any(info.layout != layout_of_partition for info in fragments):
            # The fragments of one partition are distributed over ranks in different ways, so each
            # counts by its own layout: of what tensor parallelism does not shard, its ranks hold
            # several copies.
            squares = [(info.layout.holders, info.square) for info in gradients]
    holders, square_of_all = together(squares)
    if not single or model is None:
        gradients = []
    return StepGradients(square_of_all, holders, tuple(gradients))


def _has_layouts_of_its_own(model: Module) -> bool:
    """Tell whether the parameters in one flat partition have different layouts.

    They have if AutoTP has sharded some of them, or if some belong to experts.
    """
    for parameter in model.parameters():
        if autotp_cut(parameter) is not None:
            return True
    return bool(moe_experts(model))


@dataclass(frozen=True)
class _FlatPartition:
    """A flat tensor of many parameters that an optimizer of DeepSpeed updates.

    Attributes:
        tensor: The tensor.
        group: The number of its parameter group.
    """

    tensor: torch.Tensor
    group: int


def _storage_of(tensor: torch.Tensor) -> int:
    """Return the address of the tensor's memory, which a tensor has in common with its views."""
    return tensor.untyped_storage().data_ptr()


def _gradients_of_fragments(
    model: Module, partitions: Mapping[int, _FlatPartition], layout: Layout
) -> Iterator[GradientInfo]:
    """Yield each parameter's part of the gradients of flat partitions.

    It is at the place in the partition's gradient that its master has in the partition.

    Args:
        model: The trainer's model.
        partitions: The flat partitions that the optimizer updates, by the address of their memory.
        layout: That of the partition of what is no expert.
    """
    experts = moe_experts(model)
    for name, parameter, master in flat_masters(model):
        partition = partitions.get(_storage_of(master))
        if partition is None or partition.tensor.grad is None:
            continue
        numel = master.numel()
        start = master.storage_offset() - partition.tensor.storage_offset()
        gradient = partition.tensor.grad.reshape(-1).narrow(0, start, numel)
        square = square_of(gradient)
        layout_of_part, _ = fragment_place(parameter, layout, experts)
        yield GradientInfo(name, numel, square, layout_of_part, partition.group)
