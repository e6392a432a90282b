"""Reader of optimizers, single parameters' gradients as they get them, and learning rate schedulers."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
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
    return list(optimizer) if isinstance(optimizer, Iterable) and not isinstance(optimizer, str) else [optimizer]


def entries(optimizer: Any) -> list[torch.Tensor]:
    """Return the parameters of all the optimizers, in the order of their groups."""
    groups = (group for one in several(optimizer) for group in torch_optimizer(one).param_groups)
    return [parameter for group in groups for parameter in group["params"]]


def chain(optimizer: Any) -> list[Any]:
    """Return the wrappers of one optimizer, the outermost first, and at the end the torch optimizer."""
    # AcceleratedOptimizer, DeepSpeedOptimizerWrapper and DeepSpeed's ZeRO optimizers all have the inner one as ``.optimizer``.
    links = [optimizer]
    while (inner := getattr(links[-1], "optimizer", None)) is not None and inner not in links:
        links.append(inner)
    return links


def _delegate(optimizer: Any) -> Any:
    """Return the optimizer that a torch optimizer delegates its step to, or the optimizer itself."""
    # ZeroRedundancyOptimizer's ``optim`` holds this rank's parameters and their state; its own state is what was loaded.
    inner = getattr(optimizer, "optim", None)
    return inner if isinstance(inner, torch.optim.Optimizer) else optimizer


def links(optimizer: Any) -> Iterator[Any]:
    """Yield the wrappers and the torch optimizer of each of the trainer's optimizers."""
    return (link for one in several(optimizer) for link in chain(one))


def torch_optimizer(optimizer: Any) -> Any:
    """Return the torch optimizer inside all wrappers; None for None."""
    return None if optimizer is None else chain(optimizer)[-1]


def master_copies(optimizer: Any) -> dict[int, torch.Tensor]:
    """Map the ``id`` of each float32 master copy to the parameter in low precision that it is a copy of."""
    # DeepSpeed has them where it runs without ZeRO (``FP16_UnfusedOptimizer``), in two lists that are not documented;
    # ``tests/launch/test_private_names.py`` fails when they change.
    groups = ((getattr(link, "fp16_groups", None), getattr(link, "fp32_groups", None)) for link in links(optimizer))
    low, high = next(((low, high) for low, high in groups if low and high), ((), ()))
    copies = (zip(*group, strict=True) for group in zip(low, high, strict=True))
    return {id(master): parameter for group in copies for parameter, master in group}


def owner_names(model: Module, optimizer: Any) -> dict[int, str]:
    """Map the ``id`` of each live parameter, and of each master copy of one, to the parameter's name."""
    live = {id(parameter): name for name, parameter in named_parameters(model)}
    return live | {copy: live[id(low)] for copy, low in master_copies(optimizer).items() if id(low) in live}


def read_optimizer(
    model: Module, optimizer: Any, *, whole: bool = True, without_gradient: frozenset[int] = frozenset()
) -> OptimizerInfo:
    """Return the parameters that the optimizer holds and every tensor of its state; several optimizers count as one.

    It does not call ``get_optimizer_state_dict``, which takes a step on a fresh optimizer
    (https://github.com/pytorch/pytorch/pull/125708). Without ``whole`` only the numbers of the parameter groups are
    read. Raises TypeError if one has no ``param_groups``.
    """
    chains = [chain(one) for one in several(optimizer)]
    inner = [one[-1] for one in chains]
    hint = "self.optimizer of the driver is to be the optimizer that steps, or what wraps it; of several, a list"
    for one in inner:
        if not hasattr(one, "param_groups"):
            raise TypeError(f"{type(one).__name__} has no param_groups: {hint}")
    stepping = [_delegate(one) for one in inner]
    all_links = (dict.fromkeys((*one, last)) for one, last in zip(chains, stepping, strict=True))
    types = [tuple(type(link).__name__ for link in found) for found in all_links]
    type_names = types[0] if len(types) == 1 else (" + ".join(map(" > ".join, types)),)
    groups = tuple(numbers_of(group) for one in inner for group in one.param_groups)
    if not whole:
        return OptimizerInfo(type_names, 0, param_groups=groups)
    live = {id(parameter) for parameter in model.parameters()}
    owners, copies = owner_names(model, optimizer), master_copies(optimizer)
    held = entries(optimizer)
    partitioned, layouts = _partitioned(model), wrapper_layouts(model)
    partition = partition_layout(model, layouts)
    states: list[StateInfo] = []
    for number, (parameter, state) in enumerate(pair for one in stepping for pair in one.state.items()):
        owner, known = owners.get(id(parameter), f"partition {number}"), id(parameter) in owners
        low = copies.get(id(parameter), parameter)
        layout = layouts.get(id(low)) or layout_of(parameter, WHOLE if known else partition)
        if id(parameter) not in live:
            states.append(_state(owner, "master", parameter, layout, starts_of(low)))
        states.extend(_of_parameter(owner, state, layout, low))
    return OptimizerInfo(
        chain=type_names,
        entries=len(held),
        foreign=0 if partitioned else sum(id(parameter) not in owners for parameter in held),
        states=tuple(states),
        partitioned=partitioned,
        # Only DeepSpeed has masters, and its engine has one optimizer.
        masters=tuple(info for one in stepping[:1] for info in _masters(model, one, partition)),
        accumulates=_accumulation_dtype(optimizer),
        param_groups=groups,
        without_gradient=tuple(sorted(owners[one] for one in without_gradient & owners.keys())),
    )


def numbers_of(group: dict[str, Any]) -> dict[str, float]:
    """Return the hyperparameters of a parameter group that are numbers; those of a tuple (betas) one by one."""
    numbers: dict[str, float] = {}
    for key, value in group.items():
        many = isinstance(value, (tuple, list))
        parts = {f"{key}.{n}": part for n, part in enumerate(value)} if many else {key: value}
        numbers |= {name: float(part) for name, part in parts.items() if key != "params" and _is_number(part)}
    return numbers


def _is_number(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, int, float)) and not isinstance(value, bool)


def _of_parameter(owner: str, state: Mapping[str, Any], layout: Layout, parameter: torch.Tensor) -> Iterator[StateInfo]:
    """Yield the state of a parameter, or of its master copy."""
    for key, value in state.items():
        if _is_number(value):
            # The optimizer may have made it of the local part, without saying where in the whole that is. A step count has no
            # dimension.
            plain = isinstance(value, torch.Tensor) and not hasattr(value, "placements")
            placed = plain and not valueless(value) and value.shape == local_of(parameter).shape
            starts = starts_of(parameter) if placed else None
            yield _state(owner, key, value, layout, starts)


def _state(owner: str, key: str, value: Any, layout: Layout, starts: torch.Tensor | None = None) -> StateInfo:
    """Return one entry of the state; ``layout`` is that of its owner, and of the entry unless it is a step count or a DTensor."""
    if not isinstance(value, torch.Tensor):
        return StateInfo(owner, key, type(value).__name__, 1, digest(value))
    layout = layout_of(value, WHOLE if key == "step" else layout)
    numel = local_of(value).numel()
    nbytes = sum(part.nbytes for part in stored_parts(value))
    return StateInfo(owner, key, stored_dtype(value), numel, digest(value, starts), layout, nbytes)


def _partitioned(model: Module) -> dict[str, int]:
    """Return how many elements of each live parameter this rank's flat masters hold, where DeepSpeed has such masters."""
    # ZeRO-3 has ``safe_get_local_fp32_param`` and the public ``ds_tensor`` and ``ds_numel`` for it. ZeRO-1 and 2 have only the
    # private ``_hp_mapping``: the public accessors (``deepspeed.utils.safe_get_full_fp32_param``) take part in an all_reduce,
    # which a probe must not, and always return float32. ``tests/launch/test_private_names.py`` fails when it changes.
    held = {id(parameter): master.numel() for _, parameter, master in flat_masters(model)}
    return {
        name: held.get(id(parameter), 0)
        for name, parameter in named_parameters(model)
        if parameter.requires_grad and (hasattr(parameter, "ds_tensor") or hasattr(parameter, "_hp_mapping"))
    }


def _accumulation_dtype(optimizer: Any) -> str:
    """Return the dtype in which DeepSpeed accumulates gradients; empty without DeepSpeed."""
    # The attributes are private; ``tests/launch/test_private_names.py`` fails when they change.
    names = ("gradient_accumulation_dtype", "grad_acc_dtype")
    dtypes = (getattr(link, name, None) for link in links(optimizer) for name in names)
    return next((dtype_name(dtype) for dtype in dtypes if isinstance(dtype, torch.dtype)), "")


def _masters(model: Module, inner: Any, layout: Layout) -> Iterator[StateInfo]:
    """Yield this rank's part of each parameter's flat master and moments, where DeepSpeed has them; see ``_partitioned``."""
    keys = sorted({key for state in inner.state.values() for key, value in state.items() if _is_flat(value)})
    experts = moe_experts(model)
    for name, parameter, master in flat_masters(model):
        own, starts = fragment_place(parameter, layout, experts)
        yield _state(name, "master", master, own, starts)
        if hasattr(parameter, "ds_tensor"):
            from deepspeed.utils import safe_get_local_optimizer_state

            for key in keys:
                # A partition may have no state before its first step.
                with contextlib.suppress(KeyError):
                    state = safe_get_local_optimizer_state(parameter, key)
                    yield _state(name, key, state.reshape(-1)[: master.numel()], own, starts)
        else:
            mapping = parameter._hp_mapping  # noqa: SLF001 - see ``_partitioned``
            fragment = mapping.hp_fragment_address
            # Not ``mapping.optim_fragment``: after a load it is stale until the next step.
            for flat in inner.param_groups[mapping.param_group_index]["params"]:
                for key, value in inner.state.get(flat, {}).items():
                    if _is_flat(value):
                        yield _state(name, key, value.narrow(0, fragment.start, fragment.numel), own, starts)


def flat_masters(model: Module) -> Iterator[tuple[str, Any, torch.Tensor]]:
    """Yield each live parameter with this rank's part of its master, a view of a flat partition; see ``_partitioned``."""
    for name, parameter in named_parameters(model):
        if hasattr(parameter, "ds_tensor"):
            if (master := _zero3_master(parameter)) is not None:
                yield name, parameter, master.reshape(-1)[: zero3_shard(parameter).numel()]
        elif (mapping := getattr(parameter, "_hp_mapping", None)) is not None:
            yield name, parameter, mapping.hp_fragment


def fragment_place(parameter: Any, layout: Layout, experts: Mapping[int, Expert]) -> tuple[Layout, torch.Tensor | None]:
    """Return the layout of this rank's part of a master, and where its runs start where that does not follow from the layout.

    Args:
        parameter: One that has a part in this rank's flat partition.
        layout: That of the partition of what is no expert.
        experts: The ``moe_experts`` of the model.
    """
    if expert := experts.get(id(parameter)):
        from torch import distributed

        return expert.layout(distributed.get_rank(), flat=True), None
    if not (cut := autotp_cut(parameter)):
        return layout, None
    address = parameter._hp_mapping.lp_fragment_address  # noqa: SLF001 - see ``_partitioned``
    return cut.layout(layout), cut.starts(address.start, address.numel)


def _is_flat(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 1


def _zero3_master(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return this rank's part of a ZeRO-3 parameter's master; None for one that is partitioned and not optimized."""
    from deepspeed.utils import safe_get_local_fp32_param

    with contextlib.suppress(KeyError, AttributeError):
        found: torch.Tensor | None = safe_get_local_fp32_param(parameter)
        return None if found is None else _in_zero3_partition(parameter, found)
    return None


def _in_zero3_partition(parameter: Any, master: torch.Tensor) -> torch.Tensor:
    """Return a master as a view of its flat partition, wherever that is; as it is given if it is swapped out to a disk."""
    # Of a partition that is offloaded to the CPU DeepSpeed's public accessor returns a copy on the GPU
    # (``DeepSpeedZeroOptimizer_Stage3.get_local_fp32_param``), and only a view leads to the gradient. The attributes are
    # private: ``tests/launch/test_private_names.py`` fails when they go away.
    optimizer = parameter._z3_optimizer  # noqa: SLF001 - see above
    group, start, length = optimizer.grad_position[optimizer.get_param_id(parameter)]
    partition: torch.Tensor = optimizer.fp32_partitioned_groups_flat[group]
    if start + length > partition.numel():
        return master
    return partition.narrow(0, start, length)


def read_scheduler(scheduler: Any) -> str:
    """Return a digest of the state and learning rates of each scheduler; empty for None. Raises TypeError for no scheduler."""
    return "; ".join(map(_read_scheduler, several(scheduler)))


def _read_scheduler(scheduler: Any) -> str:
    if not hasattr(scheduler, "state_dict") and not hasattr(scheduler, "__dict__"):
        description = f"self.scheduler of the driver is a {type(scheduler).__name__}: {scheduler!r:.100}"
        raise TypeError(f"{description}; expected the scheduler, None, or of several a list")
    attributes = dict(scheduler.state_dict() if hasattr(scheduler, "state_dict") else vars(scheduler))
    # A scheduler counts its calls since it was made; that count is no state of training.
    attributes.pop("_step_count", None)
    state = {key: value for key, value in attributes.items() if isinstance(value, (int, float, list, str))}
    text = json.dumps(state, sort_keys=True, default=repr)
    rates: Any = None
    # A user's own scheduler may lack this method, and DeepSpeed's OneCycle raises before its first step.
    with contextlib.suppress(AttributeError, AssertionError):
        rates = scheduler.get_last_lr()
    return f"last_epoch={state.get('last_epoch')} lr={rates} {hashlib.sha256(text.encode()).hexdigest()[:12]}"


def square_of(gradient: torch.Tensor) -> float:
    """Return the sum of the squares of this rank's elements, in float64; 0 for one without values."""
    local = local_of(gradient)
    return 0.0 if valueless(local) else float(local.double().square().sum())


def read_gradients(
    model: Module | None, optimizer: Any, tensors: Mapping[torch.Tensor, int], *, single: bool
) -> tuple[float, tuple[int, ...], tuple[GradientInfo, ...]]:
    """Return ``square``, ``holders`` and ``gradients`` of a ``StepInfo``.

    Args:
        model: The trainer's model; None if it is not known.
        optimizer: The trainer's optimizer, with its wrappers.
        tensors: What the torch optimizer is about to update, each with the place of its group.
        single: Whether the gradients of single parameters are read too.
    """
    names = owner_names(model, optimizer) if model is not None else {}
    layouts, copies = wrapper_layouts(model), master_copies(optimizer)
    partition = partition_layout(model, layouts)
    found, flat, squares = [], {}, list[tuple[Layout, float]]()
    for tensor, group in tensors.items():
        if tensor.grad is None:
            continue
        of_partition = bool(names) and id(tensor) not in names
        low = copies.get(id(tensor), tensor)
        layout = layouts.get(id(low)) or layout_of(tensor, partition if of_partition else WHOLE)
        # A part of a parameter may have the gradient of the whole.
        layout = layout_of(tensor.grad, layout)
        squares.append((layout, square_of(tensor.grad)))
        if of_partition:
            flat[local_of(tensor).untyped_storage().data_ptr()] = tensor, group
        elif names:
            numel = local_of(tensor.grad).numel()
            found.append(GradientInfo(names[id(tensor)], numel, squares[-1][1], layout, group))
    if model is not None and flat and (single or any(map(autotp_cut, model.parameters())) or moe_experts(model)):
        fragments = tuple(_of_fragments(model, flat, partition))
        found += fragments
        if any(info.layout != partition for info in fragments):
            # What tensor parallelism has left whole its ranks hold several times, unlike the rest of the partition.
            squares = [(info.layout, info.square) for info in found]
    holders, square = together((layout.holders, one) for layout, one in squares)
    return square, holders, tuple(found) if single and model is not None else ()


def _of_fragments(
    model: Module, flat: Mapping[int, tuple[torch.Tensor, int]], layout: Layout
) -> Iterator[GradientInfo]:
    """Yield the parts of flat partitions' gradients; a parameter's master is a view of its partition."""
    experts = moe_experts(model)
    for name, parameter, master in flat_masters(model):
        partition, group = flat.get(master.untyped_storage().data_ptr(), (None, 0))
        if partition is not None and partition.grad is not None:
            start = master.storage_offset() - partition.storage_offset()
            gradient = partition.grad.reshape(-1).narrow(0, start, master.numel())
            own, _ = fragment_place(parameter, layout, experts)
            yield GradientInfo(name, master.numel(), square_of(gradient), own, group)
