"""Reader of single parameters' gradients, as the optimizer gets them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from pytest_distcompat.probe.optimizer import flat_masters, owner_names
from pytest_distcompat.probe.tensors import local_of
from pytest_distcompat.trace import GradientInfo

if TYPE_CHECKING:
    from torch.nn import Module


def square_of(gradient: torch.Tensor) -> float:
    """Return the sum of the squares of this rank's elements, in float64."""
    return float(local_of(gradient).double().square().sum())


def read_gradients(
    model: Module | None, optimizer: Any, tensors: Iterable[torch.Tensor], squares: Mapping[int, float]
) -> tuple[GradientInfo, ...]:
    """Return this rank's part of the gradient of each live parameter that the optimizer is about to update.

    ``tensors`` are what the torch optimizer updates, ``squares`` the ``square_of`` their gradients by ``id``.
    """
    if model is None:
        return ()
    names, flat = owner_names(model, optimizer), {}
    found = []
    for tensor in tensors:
        if tensor.grad is None:
            continue
        if id(tensor) in names:
            found.append(GradientInfo(names[id(tensor)], local_of(tensor).numel(), squares[id(tensor)]))
        else:
            flat[tensor.untyped_storage().data_ptr()] = tensor
    return (*found, *(_of_fragments(model, flat) if flat else ()))


def _of_fragments(model: Module, flat: Mapping[int, torch.Tensor]) -> Iterator[GradientInfo]:
    """Yield the parts of flat partitions' gradients; a parameter's master is a view of its partition."""
    for name, _, master in flat_masters(model):
        partition = flat.get(master.untyped_storage().data_ptr())
        if partition is not None and partition.grad is not None:
            start = master.storage_offset() - partition.storage_offset()
            gradient = partition.grad.reshape(-1).narrow(0, start, master.numel())
            yield GradientInfo(name, master.numel(), square_of(gradient))
