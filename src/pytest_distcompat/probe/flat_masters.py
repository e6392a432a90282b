"""Flat masters of DeepSpeed's ZeRO: this rank's part of each parameter's float32 copy.

ZeRO keeps a master, a float32 copy, of each trained parameter. It joins the masters of many
parameters into one flat tensor and cuts that into equal partitions, one for each rank. What a
partition has of one parameter is a fragment, a view of the partition; it may be empty or a few
elements. The torch optimizer inside ZeRO updates partitions. Checks need values by parameter, so
this module finds each parameter's fragment, and those of its moments (``exp_avg`` and the like).

``optimizer`` calls it for the state after an action, ``gradients`` for the gradients of a step, and
``snapshot`` for sums of values. A *layout* says which part of a whole tensor this rank has. Nothing
here takes part in a collective.

Where fragments are found:

- ZeRO-3: the parameter has ``ds_tensor``, this rank's shard, and DeepSpeed has accessors such as
  ``safe_get_local_fp32_param``.
- ZeRO-1 and 2: the parameter has the private ``_hp_mapping`` ("high precision mapping"), which
  knows the place of its fragment in the partition.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from pytest_distcompat.probe.deepspeed_shards import (
    Expert,
    autotp_cut,
    moe_experts,
    named_parameters,
)
from pytest_distcompat.probe.states import state_info
from pytest_distcompat.probe.tensors import zero3_shard
from pytest_distcompat.trace import Layout, StateInfo

if TYPE_CHECKING:
    from torch.nn import Module


def partitioned_numel(model: Module) -> dict[str, int]:
    """Return how many elements of each live parameter this rank's flat masters hold, by name.

    A parameter without any on this rank has 0. Only DeepSpeed has such masters: for another trainer
    the result is empty.
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


def read_masters(model: Module, inner: Any, layout: Layout) -> Iterator[StateInfo]:
    """Yield the records of this rank's part of each parameter's flat master and moments.

    Args:
        model: The trainer's model.
        inner: The torch optimizer, inside all wrappers.
        layout: That of a partition (``layouts.partition_layout``). Experts of a MoE layer have
            partitions over other ranks, and layouts of their own.
    """
    keys = _moment_keys(inner)
    experts = moe_experts(model)
    for name, parameter, master in flat_masters(model):
        layout_of_part, starts = fragment_place(parameter, layout, experts)
        yield state_info(name, "master", master, layout_of_part, starts)
        if hasattr(parameter, "ds_tensor"):
            moments = _zero3_moments(parameter, keys, master.numel())
        else:
            moments = _zero12_moments(parameter, inner)
        for key, moment in moments:
            yield state_info(name, key, moment, layout_of_part, starts)


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
    mapping = parameter._hp_mapping  # noqa: SLF001 - see ``partitioned_numel``
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
        master: This rank's part of the master, a view of the partition (see ``partitioned_numel``).
    """

    name: str
    parameter: Any
    master: torch.Tensor


def flat_masters(model: Module) -> Iterator[FlatMaster]:
    """Yield this rank's part of each flat master, for the parameters of which it has any."""
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

    The starts say where the part's runs of consecutive elements begin in the flattened full
    parameter, for digests. They are None for a part that is a single run: those are concatenated in
    rank order instead.

    Args:
        parameter: One that has a part in this rank's flat partition.
        layout: That of a partition of parameters that belong to no expert.
        experts: The ``moe_experts`` of the model.
    """
    expert = experts.get(id(parameter))
    if expert is not None:
        from torch import distributed

        return expert.layout(distributed.get_rank(), flat=True), None
    cut = autotp_cut(parameter)
    if cut is None:
        return layout, None
    address = parameter._hp_mapping.lp_fragment_address  # noqa: SLF001 - see ``partitioned_numel``
    return cut.layout(layout), cut.starts(address.start, address.numel)


def _is_flat(value: Any) -> bool:
    """Tell whether a value of an optimizer's state is a tensor of one dimension."""
    return isinstance(value, torch.Tensor) and value.dim() == 1


def _zero3_master(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return this rank's part of a ZeRO-3 parameter's master.

    The result is None for a parameter that is partitioned and not optimized.
    """
    from deepspeed.utils import safe_get_local_fp32_param

    try:
        # The accessor raises KeyError or AttributeError for a parameter that is not optimized.
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
