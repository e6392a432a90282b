"""Reader of the gradients that an optimizer is about to step on.

``observe.Observer`` calls ``read_gradients`` in torch's global hook before each optimizer step.
There gradients are final: reduced over ranks, unscaled and clipped. The result becomes fields of a
``StepInfo``. Checks compute the norm of all gradients from it without a collective, by adding up
the shares of the ranks: each rank's share of the sum of squares, in which replicas count once.

The optimizer may step on a *live* parameter (one of the wrapped model), on a *master* (a float32
copy of one), or on a *flat partition* (ZeRO): one tensor with this rank's fragments of the masters
of many parameters. A *layout* says which part of a whole tensor this rank has, and which ranks (its
``holders``) have one copy of the tensor together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from pytest_distcompat.probe.deepspeed_shards import autotp_cut, moe_experts
from pytest_distcompat.probe.flat_masters import flat_masters, fragment_place
from pytest_distcompat.probe.layouts import layout_of, partition_layout, wrapper_layouts
from pytest_distcompat.probe.tensors import local_of, square_of
from pytest_distcompat.probe.wrapped_optimizers import master_copies, owner_names
from pytest_distcompat.trace import WHOLE, GradientInfo, Layout, together

if TYPE_CHECKING:
    from torch.nn import Module


class StepGradients(NamedTuple):
    """The gradients of one optimizer's step, as fields of a ``StepInfo``.

    Attributes:
        square: This rank's share of the sum of the squares of all gradients.
        holders: The ranks whose shares add up to that sum; empty for this rank alone, as under DDP.
        gradients: The gradient of each parameter; empty if single ones were not wanted.
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
        tensors: What the torch optimizer is about to update (live parameters, their master copies,
            or flat partitions of many parameters), each with the number of its parameter group.
        single: Whether the gradients of single parameters are returned too. They are in the first
            steps of a run only, to save time.
    """
    # The ``id`` of each live parameter, or of its master copy -> its live name. Without a model it
    # is empty: then only the sum over all gradients can be returned.
    names = {} if model is None else owner_names(model, optimizer)
    layouts = wrapper_layouts(model)
    copies = master_copies(optimizer)
    layout_of_partition = partition_layout(model, layouts)
    gradients: list[GradientInfo] = []
    # By the address of their memory, which the fragments of parameters have in common with them.
    partitions: dict[int, _FlatPartition] = {}
    # For each gradient the ranks that hold it together, and the sum of this rank's squares.
    squares: list[tuple[tuple[int, ...], float]] = []
    for tensor, group in tensors.items():
        if tensor.grad is None:
            continue
        # A tensor that is neither a live parameter nor a copy of one is a flat partition.
        is_partition = bool(names) and id(tensor) not in names
        original = copies.get(id(tensor), tensor)
        plain_layout = layout_of_partition if is_partition else WHOLE
        layout = layouts.get(id(original)) or layout_of(tensor, plain_layout)
        # A parameter that is a shard may have the gradient of the whole.
        layout = layout_of(tensor.grad, layout)
        square = square_of(tensor.grad)
        squares.append((layout.holders, square))
        # A partition is taken apart below. The gradient of a single parameter is recorded now.
        if is_partition:
            storage = _storage_of(local_of(tensor))
            partitions[storage] = _FlatPartition(tensor, group)
        elif names:
            name = names[id(tensor)]
            numel = local_of(tensor.grad).numel()
            gradients.append(GradientInfo(name, numel, square, layout, group))
    # Partitions are taken apart only if that is needed: for gradients by parameter, or for the sum,
    # if the parameters in one partition are distributed in different ways.
    if model is not None and partitions and (single or _has_layouts_of_its_own(model)):
        fragments = list(_gradients_of_fragments(model, partitions, layout_of_partition))
        gradients += fragments
        if any(info.layout != layout_of_partition for info in fragments):
            # Each fragment counts by its own layout: of what tensor parallelism does not shard, its
            # ranks hold several copies.
            squares = [(info.layout.holders, info.square) for info in gradients]
    # All these ranks, and this rank's share of the sum over them.
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

    A parameter's master is a fragment of a partition, a view of it. The parameter's gradient is at
    the same place in the gradient of the partition.

    Args:
        model: The trainer's model.
        partitions: The flat partitions that the optimizer updates, by the address of their memory.
        layout: That of a partition of parameters that belong to no expert.
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
