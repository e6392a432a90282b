"""Findings of walks as text: which values differ, and how the first of them does.

``exact`` and ``inexact`` compare a live trainer with its reference, one process that makes the same
calls, and call these functions to make findings, such as ``buffers changed: 'norm.mean' and 2
others: digest: 'a1'; expected 'b2'``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

#: The longest text of a difference that a finding shows.
_LONGEST_DIFFERENCE = 160


def unlike_reference(actual: str, expected: str) -> str:
    """Return the finding that something is not as in the reference.

    Args:
        actual: What it is: ``the loss is 0.4``.
        expected: What it is in the reference: ``0.3``.
    """
    return f"{actual}; {expected} in the reference"


#: Name -> what is compared: a digest, a record such as ``ParameterInfo``, or a number.
Values = Mapping[str, Any]


def differing(title: str, before: Values, after: Values) -> Iterator[str]:
    """Yield a finding for the names whose values differ, or that only one of both has.

    There is one finding for all of them, and none if all are equal.

    Args:
        title: How the finding begins: ``buffers changed``.
        before: The values before, or those of the reference.
        after: The values after, or those of the trainer.
    """
    names: list[str] = []
    for name in {**before, **after}:
        if before.get(name) != after.get(name):
            names.append(name)
    yield from difference_of(title, before, after, names)


def difference_of(title: str, before: Values, after: Values, names: Sequence[str]) -> Iterator[str]:
    """Yield one finding for all the names, with how the values of the first differ.

    Without names there is none. ``title`` and the values are those of ``differing``.
    """
    if not names:
        return
    first = names[0]
    others = ""
    if len(names) > 1:
        others = f" and {len(names) - 1} others"
    difference = first_difference(before.get(first), after.get(first))
    yield f"{title}: {first!r}{others}{difference}"


def first_difference(before: Any, after: Any) -> str:
    """Return how two values differ, such as ``: 3; expected 2``; empty if that is too long.

    Of two dataclasses it is the first field that differs: ``: dtype: 'float32'; expected ...``.
    """
    for name in getattr(before, "__dataclass_fields__", ()):
        old = getattr(before, name, None)
        new = getattr(after, name, None)
        if old != new:
            return f": {name}{first_difference(old, new)}"
    text = f": {after!r}; expected {before!r}"
    if len(text) >= _LONGEST_DIFFERENCE:
        return ""
    return text
