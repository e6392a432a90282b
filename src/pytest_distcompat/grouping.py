"""A function that groups values by keys. ``ext.reach`` uses it."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


def grouped(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """Return key -> its values: ``{"a": [1, 3]}`` of ``("a", 1), ("a", 3)``, in the given order."""
    values_by_key: dict[K, list[V]] = {}
    for key, value in pairs:
        values_by_key.setdefault(key, []).append(value)
    return values_by_key
