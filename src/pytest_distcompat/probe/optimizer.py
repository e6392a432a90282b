"""Reader of optimizers and of learning rate schedulers after an action.

The worker on each rank, and the recorder of a script, call ``snapshot.read_snapshot_fields`` after
each action. That calls ``read_optimizer`` with the trainer's optimizer, as wrapped as it is, and
``read_scheduler``. The results are ``Snapshot.optimizer`` and ``Snapshot.scheduler``, which checks
compare between ranks, and before and after a checkpoint is loaded.

Example: of ``AdamW`` under FSDP2 on 2 ranks ``read_optimizer`` returns, for each parameter, three
``StateInfo``: ``exp_avg`` and ``exp_avg_sq`` with a digest of this rank's shard, and ``step``.

Words: a *live* parameter is one of the model as the trainer has wrapped it. A *master* is the
float32 copy of a parameter in lower precision; the optimizer updates it in place of the parameter.
ZeRO (DeepSpeed) joins masters into flat *partitions*, one for each rank. A *layout* says which part
of a tensor this rank has; a *digest* is a hash of that part. A digest depends on the position of
each element in the whole tensor, so ``starts_of`` says where the pieces of the part begin there.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from pytest_distcompat.probe.flat_masters import partitioned_numel, read_masters
from pytest_distcompat.probe.layouts import layout_of, partition_layout, starts_of, wrapper_layouts
from pytest_distcompat.probe.states import is_number, numbers_of, state_info
from pytest_distcompat.probe.tensors import dtype_name, local_of, valueless
from pytest_distcompat.probe.wrapped_optimizers import (
    chain,
    delegate,
    entries,
    links,
    master_copies,
    owner_names,
    several,
)
from pytest_distcompat.trace import WHOLE, Layout, OptimizerInfo, StateInfo

if TYPE_CHECKING:
    from torch.nn import Module


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
            groups are. Steps in the middle of a training are read in this way, to save time.
        without_gradient: The ``id`` of each tensor that the optimizer stepped on without a
            gradient (``Observer.without_gradient``).

    Raises:
        TypeError: If one of the optimizers has no ``param_groups``.
    """
    # For each optimizer: its wrappers, the outermost first, and at the end the one of torch.
    chains = [chain(wrapped) for wrapped in several(optimizer)]
    stepping: list[Any] = []
    groups: list[dict[str, float]] = []
    for wrappers in chains:
        torch_optim = wrappers[-1]
        _require_param_groups(torch_optim)
        # torch's ZeroRedundancyOptimizer has a second optimizer inside that steps.
        stepping.append(delegate(torch_optim))
        for group in torch_optim.param_groups:
            groups.append(numbers_of(group))
    type_names = _type_names(chains, stepping)
    if not whole:
        return OptimizerInfo(type_names, 0, param_groups=tuple(groups))
    # From the ``id`` of each tensor that is a live parameter, or a copy of one, to its name.
    owners = owner_names(model, optimizer)
    # All tensors of the param groups.
    optimized = entries(optimizer)
    # Live name -> how many of its elements are in this rank's partition; empty without ZeRO.
    partitioned = partitioned_numel(model)
    # The layouts of plain tensors that FSDP1, DDP or ZeRO distributes, by ``id``.
    layouts = wrapper_layouts(model)
    partition = partition_layout(model, layouts)
    # How many of those tensors are no parameters of the model.
    foreign = 0
    if not partitioned:
        # DeepSpeed's flat partitions are no parameters of the model either, so there an entry's
        # parameter is not known by identity.
        foreign = sum(id(parameter) not in owners for parameter in optimized)
    masters: tuple[StateInfo, ...] = ()
    if stepping:
        # Only DeepSpeed has masters, and its engine has one optimizer.
        masters = tuple(read_masters(model, stepping[0], partition))
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
    for wrappers, last in zip(chains, stepping, strict=True):
        # A delegate is usually the last of the chain itself; it is listed once.
        distinct = dict.fromkeys([*wrappers, last])
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

    A state belongs to the tensor that the optimizer updates: a live parameter, a master copy, or a
    flat partition of many parameters, which has no name and is called ``partition 0``.

    Args:
        model: The trainer's model.
        optimizer: The trainer's optimizer, with its wrappers.
        stepping: The torch optimizers, inside all wrappers, whose state is read.
        owners: The ``owner_names`` of the two.
        layouts: The ``wrapper_layouts`` of the model.
        partition: The ``partition_layout`` of the model.
    """
    live = {id(parameter) for parameter in model.parameters()}
    # From the ``id`` of each master copy to its parameter; empty but for DeepSpeed without ZeRO.
    low_precision = master_copies(optimizer)
    number = 0
    for torch_optim in stepping:
        for parameter, state in torch_optim.state.items():
            owner = owners.get(id(parameter), f"partition {number}")
            original = low_precision.get(id(parameter), parameter)
            # The layout if neither the wrappers nor the tensor itself say one: a parameter is whole
            # on each rank, anything else is a flat partition.
            plain_layout = WHOLE if id(parameter) in owners else partition
            layout = layouts.get(id(original)) or layout_of(parameter, plain_layout)
            if id(parameter) not in live:
                yield state_info(owner, "master", parameter, layout, starts_of(original))
            yield from _states_of_parameter(owner, state, layout, original)
            number += 1


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
        # Flags, such as ``amsgrad``, are left out.
        if not is_number(value):
            continue
        starts: torch.Tensor | None = None
        if _is_elementwise(value, parameter):
            starts = starts_of(parameter)
        yield state_info(owner, key, value, layout, starts)


def _is_elementwise(value: Any, parameter: torch.Tensor) -> bool:
    """Tell whether a state is a plain tensor of the shape of the parameter's local part."""
    # The optimizer may have made it of the local part of a DTensor: then its elements are where
    # those of the parameter are. A DTensor knows its place itself. A step count has no dimension.
    if not isinstance(value, torch.Tensor):
        return False
    if hasattr(value, "placements") or valueless(value):
        return False
    return value.shape == local_of(parameter).shape


def _accumulation_dtype(optimizer: Any) -> str:
    """Return the dtype in which DeepSpeed accumulates gradients; empty without DeepSpeed."""
    # The attributes are private; ``tests/launch/test_private_names.py`` fails when they change.
    for link in links(optimizer):
        for name in ("gradient_accumulation_dtype", "grad_acc_dtype"):
            dtype = getattr(link, name, None)
            if isinstance(dtype, torch.dtype):
                return dtype_name(dtype)
    return ""


def read_scheduler(scheduler: Any) -> str:
    """Return the state and learning rates of each scheduler as a text; empty for None.

    Of one scheduler it reads ``last_epoch=3 lr=[0.001] 5f1c0a...``, which ends with a digest of its
    state. Texts of several are joined by ``; ``.

    Raises:
        TypeError: If the driver's ``scheduler`` is something else.
    """
    texts = [_read_scheduler(single) for single in several(scheduler)]
    return "; ".join(texts)


def _read_scheduler(scheduler: Any) -> str:
    """Return the text of one scheduler."""
    if hasattr(scheduler, "state_dict"):
        attributes = dict(scheduler.state_dict())
    elif hasattr(scheduler, "__dict__"):
        # A user's own scheduler.
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
