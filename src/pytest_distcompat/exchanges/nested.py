"""Functions on tensors in dicts, lists and tuples, in any depth.

torch has ``torch.utils._pytree`` for the same, which is private and knows no ``UserDict``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any


def combined(values: Sequence[Any], join: Callable[[list[Any]], Any]) -> Any:
    """Return one value of several that are built alike, with ``join`` of the tensors at each place.

    ``combined([{"loss": a}, {"loss": b}], torch.cat)`` is ``{"loss": torch.cat([a, b])}``.

    Args:
        values: The values; their dicts have the same keys, their lists the same lengths.
        join: Called with the tensors that stand at the same place of each value.
    """
    first = values[0]
    if isinstance(first, Mapping):
        items: dict[Any, Any] = {}
        for key in first:
            items[key] = combined([value[key] for value in values], join)
        return items
    if isinstance(first, (list, tuple)):
        parts: list[Any] = []
        for at_place in zip(*values, strict=True):
            parts.append(combined(at_place, join))
        if hasattr(first, "_fields"):
            # A named tuple takes its parts one by one.
            return type(first)(*parts)
        return type(first)(parts)
    return join(list(values))


def moved(value: Any, device: str) -> Any:
    """Return the value with its tensors on that device."""

    def move(parts: list[Any]) -> Any:
        (part,) = parts
        if hasattr(part, "to"):
            return part.to(device)
        return part

    return combined([value], move)


def described(value: Any) -> str:
    """Return the value as text: equal texts are equal values, of equal types and dtypes.

    A tensor is ``int64 (2, 1) [[0], [4]]``: dtype, shape and elements.
    """
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{dtype} {tuple(value.shape)} {value.tolist()}"
    if isinstance(value, Mapping):
        items = [f"{key!r}: {described(part)}" for key, part in value.items()]
        return f"{{{', '.join(items)}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(described, value))}]"
    if hasattr(value, "_fields"):
        fields = [f"{name}={described(getattr(value, name))}" for name in value._fields]
        return f"{type(value).__name__}({', '.join(fields)})"
    if isinstance(value, tuple):
        # As Python writes it: one part has a comma after it.
        comma = "," if len(value) == 1 else ""
        return f"({', '.join(map(described, value))}{comma})"
    return repr(value)
