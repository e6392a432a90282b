"""Functions on tensors in dicts, lists and tuples, in any depth.

torch has ``torch.utils._pytree`` for the same, which is private and knows no ``UserDict``.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def map_tensors(values: Sequence[Any], join: Callable[[list[Any]], Any]) -> Any:
    """Return one value of several that are built alike, with ``join`` of the tensors at each place.

    ``map_tensors([{"loss": a}, {"loss": b}], torch.cat)`` is ``{"loss": torch.cat([a, b])}``. The
    containers have the types of those of the first value.

    Args:
        values: The values; their dicts have the same keys, their lists the same lengths.
        join: Called with the tensors that stand at the same place of each value.
    """
    first = values[0]
    if isinstance(first, Mapping):
        # A copy, because some mappings, as defaultdict, cannot be made of their items.
        mapped: Any = copy.copy(first)
        for key in first:
            mapped[key] = map_tensors([value[key] for value in values], join)
        return mapped
    if isinstance(first, (list, tuple)):
        parts: list[Any] = []
        for at_place in zip(*values, strict=True):
            parts.append(map_tensors(at_place, join))
        if hasattr(first, "_fields"):
            # A named tuple takes its parts one by one.
            return type(first)(*parts)
        return type(first)(parts)
    return join(list(values))


def to_device(value: Any, device: str) -> Any:
    """Return the value with its tensors on that device."""

    def move(parts: list[Any]) -> Any:
        (part,) = parts
        if hasattr(part, "to"):
            return part.to(device)
        return part

    return map_tensors([value], move)


def as_text(value: Any) -> str:
    """Return the value as text. Equal texts are equal values, dtypes and kinds of containers.

    A tensor is ``int64 (2, 1) [[0], [4]]``: dtype, shape and elements. Mappings are written alike,
    whatever their type and order. Where a tensor is, and whether it requires a gradient, is not
    written.
    """
    if hasattr(value, "dtype") and hasattr(value, "tolist"):
        return _tensor_as_text(value)
    if isinstance(value, Mapping):
        items = [f"{key!r}: {as_text(value[key])}" for key in sorted(value, key=repr)]
        return f"{{{', '.join(items)}}}"
    names = _field_names(value)
    if names is not None:
        fields = [f"{name}={as_text(getattr(value, name))}" for name in names]
        return f"{type(value).__name__}({', '.join(fields)})"
    if isinstance(value, list):
        return f"[{', '.join(map(as_text, value))}]"
    if isinstance(value, tuple):
        # As Python writes it: one part has a comma after it.
        comma = "," if len(value) == 1 else ""
        return f"({', '.join(map(as_text, value))}{comma})"
    return repr(value)


def _tensor_as_text(tensor: Any) -> str:
    """Return a tensor, or an array of numpy, as text."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    library = ""
    if type(tensor).__module__ == "numpy":
        library = "numpy "
    return f"{library}{dtype} {tuple(tensor.shape)} {tensor.tolist()}"


def _field_names(value: Any) -> Sequence[str] | None:
    """Return the names of the fields of a named tuple or dataclass; None for other values."""
    if hasattr(value, "_fields"):
        names: Sequence[str] = value._fields
        return names
    if dataclasses.is_dataclass(value):
        return [field.name for field in dataclasses.fields(value)]
    return None
