"""Describe what differs between two values of a state, for messages.

``process_state.changes`` compares the state of a process before and after a test, and calls
``described`` for each value that differs. For example ``described("the environment", {}, {"FOO":
"x"})`` returns ``the environment (FOO set to 'x')``.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pytest_distcompat.excerpt import encodable

#: How many items are named, and how many characters of a value are shown.
_ITEMS_NAMED, _VALUE_LENGTH = 3, 40


def described(name: str, was: Any, now: Any, labels: Sequence[str] = ()) -> str:
    """Return the name of a state and, where possible, which part of it has changed.

    Args:
        name: What messages call the state: ``the environment``.
        was: Its value before a test.
        now: Its value after the test.
        labels: For a list, what its items are called: ``["SIGHUP", "SIGINT", ...]``.
    """
    differences = _differences(was, now, labels)
    if not differences:
        return name
    text = ", ".join(differences[:_ITEMS_NAMED])
    if len(differences) > _ITEMS_NAMED:
        text += f" and {len(differences) - _ITEMS_NAMED} more"
    return encodable(f"{name} ({text})")


def _differences(was: Any, now: Any, labels: Sequence[str]) -> list[str]:
    """Return the parts of a value that have changed; empty if it has no parts with names."""
    if isinstance(was, Mapping) and isinstance(now, Mapping):
        return list(_changed_keys(was, now))
    # A list with a label for each item: those with other values are named.
    if labels and len(was) == len(now) == len(labels):
        changed = []
        for label, old, new in zip(labels, was, now, strict=True):
            if old != new:
                changed.append(label)
        return changed
    if _are_both(was, now, (set, frozenset, list)):
        return [*_named_items("", now, was), *_named_items("no more ", was, now)]
    # A bool is an int too, but "True instead of False" says nothing.
    if _are_both(was, now, (str, int)) and not isinstance(now, bool):
        return [f"{_cut(now)} instead of {_cut(was)}"]
    return []


def _are_both(was: object, now: object, types: tuple[type, ...]) -> bool:
    """Tell whether both values are of one of the types."""
    return isinstance(was, types) and isinstance(now, types)


def _changed_keys(was: Mapping[Any, Any], now: Mapping[Any, Any]) -> Iterator[str]:
    """Yield ``FOO set to 'x'`` or ``FOO removed`` for each key whose value differs."""
    # Keys of different types may have no order.
    for key in sorted({*was, *now}, key=str):
        name = key.__name__ if isinstance(key, type) else key
        if key not in now:
            yield f"{name} removed"
        elif key not in was or was[key] != now[key]:
            yield f"{name} set to {_cut(now[key])}"


def _named_items(prefix: str, items: Any, others: Any) -> Iterator[str]:
    """Yield the items that are not among the others and have a name: threads, texts and numbers.

    Other objects are left out: the address in their repr says nothing.

    Args:
        prefix: What comes before each name: ``no more``, with a space, for removed items.
        items: A list or a set.
        others: Another one.
    """
    for item in items:
        if item in others:
            continue
        if isinstance(item, threading.Thread):
            yield prefix + item.name
        elif isinstance(item, (str, int)):
            yield prefix + _cut(item)


def _cut(value: object) -> str:
    """Return the repr of a value, shortened."""
    # A number of an enum is shown as the number.
    if isinstance(value, int):
        value = int(value)
    text = repr(value)
    if len(text) <= _VALUE_LENGTH:
        return text
    return f"{text[:_VALUE_LENGTH]}..."
