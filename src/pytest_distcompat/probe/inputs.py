"""Finds the tensors that a model is fed, wherever in its arguments they stand."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

#: How far below an argument a tensor may stand.
DEPTH = 6


def tensors_fed(arguments: Iterable[Any]) -> list[torch.Tensor]:
    """Those with a dimension, in mappings, sequences and dataclasses; only where there are none, in attributes of other objects.

    The batches of torch_geometric keep theirs so.
    """
    given = list(arguments)
    return list(_found(given, attributes=False)) or list(_found(given, attributes=True))


def _found(values: Iterable[Any], *, attributes: bool) -> Iterator[torch.Tensor]:
    seen: set[int] = set()
    level = list(values)
    for _ in range(DEPTH):
        below: list[Any] = []
        for value in level:
            if id(value) in seen:
                continue
            seen.add(id(value))
            if not isinstance(value, torch.Tensor):
                below += _parts(value, attributes=attributes)
            elif value.dim():
                yield value
        level = below


def _parts(value: Any, *, attributes: bool) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, (list, tuple)):
        return list(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, one.name) for one in dataclasses.fields(value)]
    if attributes and not isinstance(value, (type, torch.nn.Module)):
        return list(getattr(value, "__dict__", {}).values())
    return []
