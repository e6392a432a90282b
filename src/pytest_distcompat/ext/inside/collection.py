"""Compare the tests that the ranks of an external launch have collected.

Under ``torchrun -m pytest`` each rank collects all tests, and all ranks must then run the same ones
in the same order. ``external_launch`` calls ``differences`` on each rank when all have collected.
The text becomes the error with which pytest ends, for example::

    the ranks have collected different tests:
      only rank 1: tests/test_a.py::test_extra
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

#: How many differences between the tests of ranks a message shows.
_DIFFERENCES_SHOWN = 5


def differences(collections: Mapping[int, Mapping[str, list[str]]]) -> str:
    """Return how the collected tests differ between ranks; empty if they do not.

    Args:
        collections: By rank, ``{"items": [...], "errors": [...]}``: the node ids of the tests, in
            order, and the errors of their collection.
    """
    own = collections[0]
    for rank, other in collections.items():
        if other["errors"] != own["errors"]:
            own_errors = _first_or_none(own["errors"])
            other_errors = _first_or_none(other["errors"])
            errors = f"rank 0: {own_errors}; rank {rank}: {other_errors}"
            return f"not all ranks have the same errors of collection. {errors}"
        if other["items"] != own["items"]:
            return _different_items(own["items"], other["items"], rank)
    return ""


def _first_or_none(texts: Sequence[str]) -> str:
    """Return the first text, or the word ``none``."""
    return texts[0] if texts else "none"


def _different_items(own: Sequence[str], others: Sequence[str], rank: int) -> str:
    """Return how the node ids of rank 0 (``own``) and of another rank differ, in a few lines.

    The ranks have different tests, or the same in another order.
    """
    lines: list[str] = []
    for line in difflib.unified_diff(sorted(own), sorted(others), lineterm="", n=0):
        # The headings of a diff.
        if line.startswith(("---", "+++", "@@")):
            continue
        only_rank = 0 if line[0] == "-" else rank
        lines.append(f"  only rank {only_rank}: {line[1:]}")
    if not lines:
        pairs = zip(own, others, strict=True)
        for number, (nodeid, other) in enumerate(pairs, 1):
            if nodeid != other:
                pair = f"rank 0 has {nodeid}, rank {rank} has {other}"
                return f"the ranks have their tests in different orders: as number {number} {pair}"
    shown = ["the ranks have collected different tests:", *lines[:_DIFFERENCES_SHOWN]]
    if len(lines) > _DIFFERENCES_SHOWN:
        shown.append(f"  and {len(lines) - _DIFFERENCES_SHOWN} more")
    return "\n".join(shown)
