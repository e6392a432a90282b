"""Descriptions of what a test left changed: which variable, handler or thread, in a few words."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pytest_distcompat.excerpt import encodable

#: How many items are named, and how many characters of a value are shown.
_ITEMS_NAMED, _VALUE_LENGTH = 3, 40


def described(name: str, was: Any, now: Any, labels: Sequence[str] = ()) -> str:
    """Return ``name`` and, where possible, what of it has changed: ``the environment (FOO set to 'x')``.

    Args:
        name: What is compared.
        was: What it was before.
        now: What it is.
        labels: What the items are called where both are lists of as many items.
    """
    if isinstance(was, Mapping) and isinstance(now, Mapping):
        found = list(_of_mappings(was, now))
    elif labels and len(was) == len(now) == len(labels):
        found = [label for label, old, new in zip(labels, was, now, strict=True) if old != new]
    elif isinstance(was, (set, frozenset, list)) and isinstance(now, (set, frozenset, list)):
        found = [*_of_items("", now, was), *_of_items("no more ", was, now)]
    elif all(isinstance(one, (str, int)) for one in (was, now)) and not isinstance(now, bool):
        found = [f"{_cut(now)} instead of {_cut(was)}"]
    else:
        found = []
    if not found:
        return name
    more = f" and {len(found) - _ITEMS_NAMED} more" if len(found) > _ITEMS_NAMED else ""
    return encodable(f"{name} ({', '.join(found[:_ITEMS_NAMED])}{more})")


def signal_names(numbers: Sequence[int]) -> list[str]:
    """Return the signals' names; the number of a signal that has none."""
    names = {int(one): one.name for one in signal.Signals}
    return [names.get(int(number), str(int(number))) for number in numbers]


def _of_mappings(was: Mapping[Any, Any], now: Mapping[Any, Any]) -> Iterator[str]:
    # Keys of different types may have no order.
    for key in sorted({*was, *now}, key=str):
        name = key.__name__ if isinstance(key, type) else key
        if key not in now:
            yield f"{name} removed"
        elif key not in was or was[key] != now[key]:
            yield f"{name} set to {_cut(now[key])}"


def _of_items(prefix: str, items: Any, others: Any) -> Iterator[str]:
    """Yield the items that are not among the others and have a name: the address of any other object says nothing."""
    for one in items:
        if one not in others and isinstance(one, (str, int, threading.Thread)):
            yield prefix + (one.name if isinstance(one, threading.Thread) else _cut(one))


def _cut(value: object) -> str:
    text = repr(int(value) if isinstance(value, int) else value)
    return text if len(text) <= _VALUE_LENGTH else f"{text[:_VALUE_LENGTH]}..."
