"""Is a corrupted checkpoint an error that names the file?"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePath

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks._base import check, only_where_it_differs
from pytest_distcompat.scenario import DAMAGE
from pytest_distcompat.trace import RunTrace, Trace

_FRAMES = re.compile(r'^( +)File ".*\n(?:\1  .*\n?)*', re.MULTILINE)
_CORRUPTIONS = {"truncate": "cut in half", "remove": "gone"}


@check(
    scenario=DAMAGE,
    costly=True,
    until=(("truncated", "damage", 0), ("removed", "damage", 0)),
    order=15,
    not_applicable=only_where_it_differs,
    depends_on=frozenset({"model", "state_dict"}),
    raises=("truncated", "removed"),
)
def damage(cell: Cell, trace: Trace) -> Iterator[str]:
    """Check that loading a checkpoint whose largest file is truncated or missing raises an error that names the file.

    Training neither goes on with fresh or partial weights nor hangs.

    If it fails: missing weights were initialized anew, or a rank waits for another that failed to read its shard.
    """
    for name in ("truncated", "removed"):
        yield from _judged(trace.run(name))


def _judged(run: RunTrace) -> Iterator[str]:
    snapshot = run.first("damage")
    if snapshot is None or not snapshot.files:
        yield f"{run.name}: no file was corrupted"
        return
    corrupted = snapshot.files[0]
    damaged = f"file {corrupted.path!r} is {_CORRUPTIONS[corrupted.holds]}"
    end = run.end
    if end is None or end.action not in {"load", "build"}:
        after = "went on" if end is None else f"failed in {end.action!r} only: {short(end.message)}"
        yield f"{damaged}: it was loaded without an error, and training {after}"
    elif PurePath(corrupted.path).name not in without_frames(end.text):
        yield f"{damaged}: the error does not name it: {short(end.message)}"


def without_frames(text: str) -> str:
    """Return a traceback without its source lines, which may name a file that no message does."""
    return _FRAMES.sub("", text)


def short(message: str) -> str:
    """Return the first and the last line: an exception of several ranks lists the ranks' own between them."""
    lines = [line for line in message.splitlines() if line.strip()] or [""]
    return lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1]}"
