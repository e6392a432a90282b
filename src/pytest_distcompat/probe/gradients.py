"""Reader of single parameters' gradients, as the optimizer gets them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from pytest_distcompat.probe.layouts import (
    WHOLE,
    autotp_cut,
    layout_of,
    moe_experts,
    partition_layout,
    wrapper_layouts,
)
from pytest_distcompat.probe.optimizer import flat_masters, fragment_place, master_copies, owner_names
from pytest_distcompat.probe.tensors import local_of, valueless
from pytest_distcompat.trace import GradientInfo, Layout, together

if TYPE_CHECKING:
    from torch.nn import Module


def square_of(gradient: torch.Tensor) -> float:
    """Return the sum of the squares of this rank's elements, in float64; 0 for one without values."""
    local = local_of(gradient)
    return 0.0 if valueless(local) else float(local.double().square().sum())


def read_gradients(
    model: Module | None, optimizer: Any, tensors: Iterable[torch.Tensor], *, single: bool
) -> tuple[float, tuple[int, ...], tuple[GradientInfo, ...]]:
    """Return ``square``, ``holders`` and ``gradients`` of a ``StepInfo``.

    Args:
        model: The trainer's model; None if it is not known.
        optimizer: The trainer's optimizer, with its wrappers.
        tensors: What the torch optimizer is about to update.
        single: Whether the gradients of single parameters are read too.
    """
    names = owner_names(model, optimizer) if model is not None else {}
    layouts, copies = wrapper_layouts(model), master_copies(optimizer)
    partition = partition_layout(model, layouts)
    found, flat, squares = [], {}, list[tuple[Layout, float]]()
    for tensor in tensors:
        if tensor.grad is None:
            continue
        of_partition = bool(names) and id(tensor) not in names
        low = copies.get(id(tensor), tensor)
        layout = layouts.get(id(low)) or layout_of(tensor, partition if of_partition else WHOLE)
        # A part of a parameter may have the gradient of the whole.
        layout = layout_of(tensor.grad, layout)
        squares.append((layout, square_of(tensor.grad)))
        if of_partition:
            flat[local_of(tensor).untyped_storage().data_ptr()] = tensor
        elif names:
            found.append(GradientInfo(names[id(tensor)], local_of(tensor.grad).numel(), squares[-1][1], layout))
    if model is not None and flat and (single or any(map(autotp_cut, model.parameters())) or moe_experts(model)):
        fragments = tuple(_of_fragments(model, flat, partition))
        found += fragments
        if any(info.layout != partition for info in fragments):
            # What tensor parallelism has left whole its ranks hold several times, unlike the rest of the partition.
            squares = [(info.layout, info.square) for info in found]
    holders, square = together((layout.holders, one) for layout, one in squares)
    return square, holders, tuple(found) if single and model is not None else ()


def _of_fragments(model: Module, flat: Mapping[int, torch.Tensor], layout: Layout) -> Iterator[GradientInfo]:
    """Yield the parts of flat partitions' gradients; a parameter's master is a view of its partition."""
    experts = moe_experts(model)
    for name, parameter, master in flat_masters(model):
        partition = flat.get(master.untyped_storage().data_ptr())
        if partition is not None and partition.grad is not None:
            start = master.storage_offset() - partition.storage_offset()
            gradient = partition.grad.reshape(-1).narrow(0, start, master.numel())
            yield GradientInfo(name, master.numel(), square_of(gradient), fragment_place(parameter, layout, experts)[0])
