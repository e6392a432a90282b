"""Search for the tensors in a model's arguments, however nested they are."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

#: How many levels below an argument are searched.
DEPTH = 6


def tensors_fed(arguments: Iterable[Any]) -> list[torch.Tensor]:
    """Return the tensors with at least one dimension in mappings, sequences and dataclasses."""
    # If there are none, attributes of other objects are searched too: the batches of torch_geometric keep their tensors there.
    values = list(arguments)
    return list(_tensors_in(values, attributes=False)) or list(_tensors_in(values, attributes=True))


def _tensors_in(values: Iterable[Any], *, attributes: bool) -> Iterator[torch.Tensor]:
    """Yield the tensors with at least one dimension, level by level; each object is visited once."""
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
