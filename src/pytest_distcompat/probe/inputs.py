"""Digests of what a model is fed, whatever objects the batch is made of.

``observe.Observer`` calls ``digest_of_inputs`` in a hook before each forward pass of the model,
with its positional and keyword arguments; ``worker`` calls it with the batches of a pipeline. The
digest of a tensor is a hash of its values, as text. Two ranks that are fed the same batch have the
same text. Arguments may be tensors, dictionaries, the ``BatchEncoding`` of transformers, or objects
of any library.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from pytest_distcompat.probe.tensors import digest


def digest_of_inputs(values: Any) -> str:
    """Return the digests of all tensors in some values as one text, sorted.

    Sorted, because a trainer may pass the same tensors in another order or by keyword.
    """
    digests = [digest(tensor) for tensor in tensors_fed(values)]
    return " ".join(sorted(digests))


#: How deeply arguments are searched for tensors, in levels of containers.
DEPTH = 6


def tensors_fed(arguments: Iterable[Any]) -> list[torch.Tensor]:
    """Return the tensors with at least one dimension in the arguments of a model.

    They are searched in mappings, sequences and dataclasses; if these have none, in the attributes
    of other objects too, such as the batches of torch_geometric. Tensors without dimensions, such
    as a number of items, are no data.
    """
    values = list(arguments)
    tensors = list(_tensors_in(values, attributes=False))
    if tensors:
        return tensors
    return list(_tensors_in(values, attributes=True))


def _tensors_in(values: Iterable[Any], *, attributes: bool) -> Iterator[torch.Tensor]:
    """Yield the tensors with at least one dimension, level by level; visit each object once.

    With ``attributes`` the attributes of any object are searched too.
    """
    visited: set[int] = set()
    level = list(values)
    for _ in range(DEPTH):
        next_level: list[Any] = []
        for value in level:
            if id(value) in visited:
                continue
            visited.add(id(value))
            if not isinstance(value, torch.Tensor):
                next_level += _children(value, attributes=attributes)
            elif value.dim():
                yield value
        level = next_level


def _children(value: Any, *, attributes: bool) -> list[Any]:
    """Return the values that a container, or with ``attributes`` any object, holds directly."""
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, (list, tuple)):
        return list(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    if attributes and not isinstance(value, (type, torch.nn.Module)):
        return list(getattr(value, "__dict__", {}).values())
    return []
