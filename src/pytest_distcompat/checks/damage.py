"""Is a corrupted checkpoint an error that names the file?"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePath

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks._base import check, only_where_it_differs
from pytest_distcompat.scenario import DAMAGE
from pytest_distcompat.trace import RunTrace, Trace

#: What a traceback shows of the code, which may have the name in it and tell nobody; the exceptions' own lines are no frames.
_FRAMES = re.compile(r'^( +)File ".*\n(?:\1  .*\n?)*', re.MULTILINE)
_DONE = {"truncate": "cut in half", "remove": "gone"}


@check(
    scenario=DAMAGE,
    costly=True,
    until=(("truncated", "damage", 0), ("removed", "damage", 0)),
    order=15,
    not_applicable=only_where_it_differs,
    raises=("truncated", "removed"),
)
def damage(cell: Cell, trace: Trace) -> Iterator[str]:
    """Loading a checkpoint whose largest file is cut in half, or gone, ends in an exception that names the file. It never
    goes on with fresh weights or a part of them, and it never hangs.

    If it fails: weights that are missing were taken for weights that are to be made anew, or a rank waits for another
    that has failed to read its shard. What reads the file should say which it was: on a file system with many of them
    "unexpected end of data" is no help.
    """
    for name in ("truncated", "removed"):
        yield from _judged(trace.run(name))


def _judged(run: RunTrace) -> Iterator[str]:
    snapshot = run.first("damage")
    if snapshot is None or not snapshot.files:
        yield f"{run.name}: nothing was spoilt"
        return
    corrupted = snapshot.files[0]
    what = f"file {corrupted.path!r} is {_DONE[corrupted.holds]}"
    end = run.end
    if end is None or end.action not in {"load", "build"}:
        after = "went on" if end is None else f"failed in {end.action!r} only: {_short(end.message)}"
        yield f"{what}: it was loaded without an error, and training {after}"
    elif PurePath(corrupted.path).name not in _FRAMES.sub("", end.text):
        yield f"{what}: the error does not name it: {_short(end.message)}"


def _short(message: str) -> str:
    """The first line and the last: an exception of several ranks tells its own between them."""
    lines = [line for line in message.splitlines() if line.strip()] or [""]
    return lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1]}"
