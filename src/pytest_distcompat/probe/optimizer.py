"""Reader of optimizers, of the gradients that they get, and of learning rate schedulers.

A trainer's optimizer is a torch optimizer in any number of wrappers, or several of those. The torch
optimizer updates one of:

- the live parameters, those of the model as the trainer has wrapped it;
- master copies of them in float32, a tensor for each (DeepSpeed without ZeRO);
- flat partitions (ZeRO): one tensor with this rank's part of the masters of many parameters. What a partition has of one
  parameter is a fragment, a view of it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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
    """Return the trainer's optimizers or schedulers as a list: one, those of an iterable, or none for None."""
    # ``torch.optim.Muon`` needs a second one for parameters that are no matrices.
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
    """Return the wrappers of one optimizer, the outermost first, and at the end the torch optimizer."""
    # AcceleratedOptimizer, DeepSpeedOptimizerWrapper and DeepSpeed's ZeRO optimizers all have the
    # inner one as ``.optimizer``.
    links = [optimizer]
    while True:
        inner = getattr(links[-1], "optimizer", None)
        if inner is None or inner in links:
            return links
        links.append(inner)


def _delegate(optimizer: Any) -> Any:
    """Return the optimizer that a torch optimizer delegates its step to, or the optimizer itself."""
    # ZeroRedundancyOptimizer's ``optim`` holds this rank's parameters and their state; its own
    # state is what was loaded.
    inner = getattr(optimizer, "optim", None)
    return inner if isinstance(inner, torch.optim.Optimizer) else optimizer


def links(optimizer: Any) -> Iterator[Any]:
    """Yield the wrappers and the torch optimizer of each of the trainer's optimizers."""
    for wrapped in several(optimizer):
        yield from chain(wrapped)


def torch_optimizer(optimizer: Any) -> Any:
    """Return the torch optimizer inside all wrappers; None for None."""
    return None if optimizer is None else chain(optimizer)[-1]


def master_copies(optimizer: Any) -> dict[int, torch.Tensor]:
    """Map the ``id`` of each float32 master copy to the parameter in low precision that it is a copy of."""
    # DeepSpeed has them where it runs without ZeRO (``FP16_UnfusedOptimizer``), in two lists that
    # are not documented; ``tests/launch/test_private_names.py`` fails when they change.
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
    """Map the ``id`` of each live parameter, and of each master copy of one, to the parameter's name."""
    names = {id(parameter): name for name, parameter in named_parameters(model)}
    copies: dict[int, str] = {}
    for copy, parameter in master_copies(optimizer).items():
        if id(parameter) in names:
            copies[copy] = names[id(parameter)]
    return names | copies


def read_optimizer(
    model: Module,
    optimizer: Any,
    *,
    whole: bool = True,
    without_gradient: frozenset[int] = frozenset(),
) -> OptimizerInfo:
    """Return the parameters that the optimizer holds and every tensor of its state; several optimizers count as one.

    It does not call ``get_optimizer_state_dict``, which takes a step on a fresh optimizer
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
    inner = [wrappers[-1] for wrappers in chains]
    for torch_optim in inner:
        _require_param_groups(torch_optim)
    stepping = [_delegate(torch_optim) for torch_optim in inner]
    type_names = _type_names(chains, stepping)
    groups: list[dict[str, float]] = []
    for torch_optim in inner:
        groups.extend(numbers_of(group) for group in torch_optim.param_groups)
    if not whole:
        return OptimizerInfo(type_names, 0, param_groups=tuple(groups))
    owners = owner_names(model, optimizer)
    optimized = entries(optimizer)
    partitioned = _partitioned(model)
    layouts = wrapper_layouts(model)
    partition = partition_layout(model, layouts)
    # DeepSpeed's flat partitions are no parameters of the model, so what an entry belongs to is not
    # known by identity.
    unowned = [parameter for parameter in optimized if id(parameter) not in owners]
    masters: tuple[StateInfo, ...] = ()
    if stepping:
        # Only DeepSpeed has masters, and its engine has one optimizer.
        masters = tuple(_masters(model, stepping[0], partition))
    return OptimizerInfo(
        chain=type_names,
        entries=len(optimized),
        foreign=0 if partitioned else len(unowned),
        states=tuple(
            _states(model, optimizer, stepping, owners=owners, layouts=layouts, partition=partition)
        ),
        partitioned=partitioned,
        masters=masters,
        accumulates=_accumulation_dtype(optimizer),
        param_groups=tuple(groups),
        without_gradient=tuple(
            sorted(owners[parameter] for parameter in without_gradient & owners.keys())
        ),
    )


def _require_param_groups(optimizer: Any) -> None:
    """Raise TypeError if it is no torch optimizer."""
    if not hasattr(optimizer, "param_groups"):
        hint = "self.optimizer of the driver is to be the optimizer that steps, or what wraps it; of several, a list"
        raise TypeError(f"{type(optimizer).__name__} has no param_groups: {hint}")


def _type_names(chains: list[list[Any]], stepping: list[Any]) -> tuple[str, ...]:
    """Return the class names from the outermost wrapper to the optimizer that steps; of several optimizers one text."""
    names: list[tuple[str, ...]] = []
    for wrappers, delegate in zip(chains, stepping, strict=True):
        distinct = dict.fromkeys([*wrappers, delegate])
        names.append(tuple(type(link).__name__ for link in distinct))
    if len(names) == 1:
        return names[0]
    return (" + ".join(" > ".join(chain_names) for chain_names in names),)


def _states(
    model: Module,
    optimizer: Any,
    stepping: list[Any],
    *,
    owners: Mapping[int, str],
    layouts: Mapping[int, Layout],
    partition: Layout,
) -> Iterator[StateInfo]:
    """Yield every tensor of the optimizers' state, and what they update that is no parameter of the model: master copies.

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
    """Return the hyperparameters of a parameter group that are numbers; those of a tuple (betas) one by one."""
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
    return isinstance(value, (torch.Tensor, int, float)) and not isinstance(value, bool)


def _states_of_parameter(
    owner: str, state: Mapping[str, Any], layout: Layout, parameter: torch.Tensor
) -> Iterator[StateInfo]:
    """Yield the state of a parameter, or of its master copy."""
    for key, value in state.items():
        if _is_number(value):
            starts = starts_of(parameter) if _is_elementwise(value, parameter) else None
            yield _state(owner, key, value, layout, starts)


def _is_elementwise(value: Any, parameter: torch.Tensor) -> bool:
    """Tell whether a state is a plain tensor with an element for each element of the parameter's local part."""
    # The optimizer may have made it of the local part of a DTensor. A step count has no dimension.
    if not isinstance(value, torch.Tensor) or hasattr(value, "placements") or valueless(value):
        return False
    return value.shape == local_of(parameter).shape


def _state(
    owner: str, key: str, value: Any, layout: Layout, starts: torch.Tensor | None = None
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
    layout = layout_of(value, WHOLE if key == "step" else layout)
    numel = local_of(value).numel()
    nbytes = sum(part.nbytes for part in stored_parts(value))
    return StateInfo(owner, key, stored_dtype(value), numel, digest(value, starts), layout, nbytes)


def _partitioned(model: Module) -> dict[str, int]:
    """Return how many elements of each live parameter this rank's flat masters hold, where DeepSpeed has such masters."""
    # ZeRO-3 has ``safe_get_local_fp32_param`` and the public ``ds_tensor`` and ``ds_numel`` for it.
    # ZeRO-1 and 2 have only the private ``_hp_mapping``: the public accessors
    # (``deepspeed.utils.safe_get_full_fp32_param``) take part in an all_reduce, which a probe must
    # not, and always return float32. ``tests/launch/test_private_names.py`` fails when it changes.
    numel_by_id = {id(parameter): master.numel() for _, parameter, master in flat_masters(model)}
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
    """Yield this rank's part of each parameter's flat master and moments, where DeepSpeed has them; see ``_partitioned``."""
    keys: set[str] = set()
    for state in inner.state.values():
        keys.update(key for key, value in state.items() if _is_flat(value))
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


def _zero3_moments(
    parameter: Any, keys: Iterable[str], numel: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the ``numel`` elements that this rank has of each moment of a ZeRO-3 parameter, with the moment's key."""
    from deepspeed.utils import safe_get_local_optimizer_state

    for key in sorted(keys):
        # A partition may have no state before its first step.
        with contextlib.suppress(KeyError):
            state = safe_get_local_optimizer_state(parameter, key)
            yield key, state.reshape(-1)[:numel]


def _zero12_moments(parameter: Any, inner: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield this rank's part of each moment of a ZeRO-1 or ZeRO-2 parameter, with the moment's key."""
    mapping = parameter._hp_mapping  # noqa: SLF001 - see ``_partitioned``
    fragment = mapping.hp_fragment_address
    # Not ``mapping.optim_fragment``: after a load it is stale until the next step.
    for partition in inner.param_groups[mapping.param_group_index]["params"]:
        for key, value in inner.state.get(partition, {}).items():
            if _is_flat(value):
                yield key, value.narrow(0, fragment.start, fragment.numel)


def flat_masters(model: Module) -> Iterator[tuple[str, Any, torch.Tensor]]:
    """Yield each live parameter with this rank's part of its master, a view of a flat partition; see ``_partitioned``."""
    for name, parameter in named_parameters(model):
        if hasattr(parameter, "ds_tensor"):
            master = _zero3_master(parameter)
            if master is not None:
                yield name, parameter, master.reshape(-1)[: zero3_shard(parameter).numel()]
            continue
        mapping = getattr(parameter, "_hp_mapping", None)
        if mapping is not None:
            yield name, parameter, mapping.hp_fragment


def fragment_place(
    parameter: Any, layout: Layout, experts: Mapping[int, Expert]
) -> tuple[Layout, torch.Tensor | None]:
    """Return the layout of this rank's part of a master, and where its runs start where that does not follow from the layout.

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
    """Return this rank's part of a ZeRO-3 parameter's master; None for one that is partitioned and not optimized."""
    from deepspeed.utils import safe_get_local_fp32_param

    try:
        master: torch.Tensor | None = safe_get_local_fp32_param(parameter)
        return None if master is None else _in_zero3_partition(parameter, master)
    except (KeyError, AttributeError):
        return None


def _in_zero3_partition(parameter: Any, master: torch.Tensor) -> torch.Tensor:
    """Return a master as a view of its flat partition, wherever that is; as it is given if it is swapped out to a disk."""
    # Of a partition that is offloaded to the CPU DeepSpeed's public accessor returns a copy on the
    # GPU (``DeepSpeedZeroOptimizer_Stage3.get_local_fp32_param``), and only a view leads to the
    # gradient. The attributes are private: ``tests/launch/test_private_names.py`` fails when they
    # go away.
    optimizer = parameter._z3_optimizer  # noqa: SLF001 - see above
    group, start, length = optimizer.grad_position[optimizer.get_param_id(parameter)]
    partition: torch.Tensor = optimizer.fp32_partitioned_groups_flat[group]
    if start + length > partition.numel():
        return master
    return partition.narrow(0, start, length)


def read_scheduler(scheduler: Any) -> str:
    """Return a digest of the state and learning rates of each scheduler; empty for None. Raises TypeError for no scheduler."""
    return "; ".join(_read_scheduler(each) for each in several(scheduler))


def _read_scheduler(scheduler: Any) -> str:
    if not hasattr(scheduler, "state_dict") and not hasattr(scheduler, "__dict__"):
        description = (
            f"self.scheduler of the driver is a {type(scheduler).__name__}: {scheduler!r:.100}"
        )
        raise TypeError(f"{description}; expected the scheduler, None, or of several a list")
    if hasattr(scheduler, "state_dict"):
        attributes = dict(scheduler.state_dict())
    else:
        attributes = dict(vars(scheduler))
    # A scheduler counts its calls since it was made; that count is no state of training.
    attributes.pop("_step_count", None)
    state = {
        key: value
        for key, value in attributes.items()
        if isinstance(value, (int, float, list, str))
    }
    text = json.dumps(state, sort_keys=True, default=repr)
    rates: Any = None
    # A user's own scheduler may lack this method, and DeepSpeed's OneCycle raises before its first
    # step.
    with contextlib.suppress(AttributeError, AssertionError):
        rates = scheduler.get_last_lr()
    digest_of_state = hashlib.sha256(text.encode()).hexdigest()[:12]
    return f"last_epoch={state.get('last_epoch')} lr={rates} {digest_of_state}"


def square_of(gradient: torch.Tensor) -> float:
    """Return the sum of the squares of this rank's elements, in float64; 0 for one without values."""
    local = local_of(gradient)
    if valueless(local):
        return 0.0
    return float(local.double().square().sum())


def read_gradients(
    model: Module | None, optimizer: Any, tensors: Mapping[torch.Tensor, int], *, single: bool
) -> tuple[float, tuple[int, ...], tuple[GradientInfo, ...]]:
    """Read the gradients that an optimizer is about to step on, after unscaling and clipping.

    Args:
        model: The trainer's model; None if it is not known.
        optimizer: The trainer's optimizer, with its wrappers.
        tensors: What the torch optimizer is about to update, each with the number of its parameter
            group.
        single: Whether the gradients of single parameters are returned too.

    Returns:
        ``square``, ``holders`` and ``gradients`` of a ``StepInfo``: this rank's share of the sum of
            the squares of all gradients;
        the ranks whose shares add up to that sum; the gradient of each parameter.
    """
    names = {} if model is None else owner_names(model, optimizer)
    layouts = wrapper_layouts(model)
    copies = master_copies(optimizer)
    layout_of_partition = partition_layout(model, layouts)
    gradients: list[GradientInfo] = []
    partitions: dict[int, _FlatPartition] = {}
    squares: list[tuple[Layout, float]] = []
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
        squares.append((layout, square))
        if is_partition:
            partitions[_storage_of(local_of(tensor))] = _FlatPartition(tensor, group)
        elif names:
            numel = local_of(tensor.grad).numel()
            gradients.append(GradientInfo(names[id(tensor)], numel, square, layout, group))
    if model is not None and partitions and (single or _has_layouts_of_its_own(model)):
        fragments = list(_gradients_of_fragments(model, partitions, layout_of_partition))
        gradients += fragments
        if any(info.layout != layout_of_partition for info in fragments):
            # The fragments of one partition lie over ranks in different ways, so that each counts
            # by its own layout: what tensor parallelism has left whole its ranks hold several
            # times.
            squares = [(info.layout, info.square) for info in gradients]
    square, holders = _square_and_holders(squares)
    if not single or model is None:
        return square, holders, ()
    return square, holders, tuple(gradients)


def _square_and_holders(squares: Iterable[tuple[Layout, float]]) -> tuple[float, tuple[int, ...]]:
    """Return this rank's share of the sum of squares, and the ranks whose shares add up to that sum.

    Args:
        squares: The layout of each gradient, and the sum of the squares of this rank's elements.
    """
    holders, square = together((layout.holders, square) for layout, square in squares)
    return square, holders


def _has_layouts_of_its_own(model: Module) -> bool:
    """Tell whether parameters in one flat partition lie over ranks in different ways: by AutoTP, or as experts."""
    if any(autotp_cut(parameter) is not None for parameter in model.parameters()):
        return True
    return bool(moe_experts(model))


@dataclass(frozen=True)
class _FlatPartition:
    """A flat tensor of many parameters that an optimizer of DeepSpeed updates, and the place of its parameter group."""

    tensor: torch.Tensor
    group: int


def _storage_of(tensor: torch.Tensor) -> int:
    """Return the address of the tensor's memory, which a tensor has in common with its views."""
    return tensor.untyped_storage().data_ptr()


def _gradients_of_fragments(
    model: Module, partitions: Mapping[int, _FlatPartition], layout: Layout
) -> Iterator[GradientInfo]:
    """Yield what each parameter has of the gradients of flat partitions: the part that lies as its master does in the partition.

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
        start = master.storage_offset() - partition.tensor.storage_offset()
        gradient = partition.tensor.grad.reshape(-1).narrow(0, start, master.numel())
        layout_of_part, _ = fragment_place(parameter, layout, experts)
        yield GradientInfo(
            name, master.numel(), square_of(gradient), layout_of_part, partition.group
        )
