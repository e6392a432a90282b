"""Is a corrupted checkpoint an error that names the file?

And does a checkpoint work in a directory with any name?
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePath

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks._base import check, every_rank, only_where_it_differs
from pytest_distcompat.driver import Driver
from pytest_distcompat.model_values import differences, flat_parameters, settings, values
from pytest_distcompat.scenario import (
    BLOCKED_RUN,
    DAMAGE,
    NAMED_RUN,
    PATHS,
    PATHS_AT_BUILD,
    Scenario,
)
from pytest_distcompat.trace import RunFailure, RunTrace, Trace

#: The frames of a traceback: a line ``File "..."``, and the lines below it that are indented
#: further.
_FRAMES = re.compile(r'^( +)File ".*\n(?:\1  .*\n?)*', re.MULTILINE)
#: What a file is after each way to corrupt it, as ``FileInfo.holds`` names the way.
_CORRUPTIONS = {"truncate": "cut in half", "remove": "gone"}
#: The actions in which a checkpoint may be read; a later error is not about its files.
_LOADING = frozenset({"load", "build"})


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
    """Check that loading a damaged checkpoint raises an error that names the damaged file.

    The largest file is truncated, or missing. Training neither goes on with fresh or partial
    weights nor hangs.

    If it fails: missing weights were initialized anew, or a rank waits for another that failed to
    read its shard.
    """
    for name in ("truncated", "removed"):
        yield from _loaded_without_error(trace.run(name))


def _loaded_without_error(run: RunTrace) -> Iterator[str]:
    """Yield a finding unless the load ends in an error that names the corrupted file."""
    snapshot = run.first("damage")
    if snapshot is None or not snapshot.files:
        yield f"{run.name}: no file was corrupted"
        return
    corrupted = snapshot.files[0]
    problem = f"file {corrupted.path!r} is {_CORRUPTIONS[corrupted.holds]}"
    if run.end is None or run.end.action not in _LOADING:
        yield f"{problem}: it was loaded without an error, and training {_later(run.end)}"
    elif PurePath(corrupted.path).name not in without_frames(run.end.text):
        yield f"{problem}: the error does not name it: {short(run.end.message)}"


def _later(end: RunFailure | None) -> str:
    """Return, for the end of a finding, what training did where it should have raised."""
    if end is None:
        return "went on"
    return f"failed in {end.action!r} only: {short(end.message)}"


def without_frames(text: str) -> str:
    """Return a traceback without its source lines, which may name a file that no message does."""
    return _FRAMES.sub("", text)


def short(message: str) -> str:
    """Return the first and the last line of an exception's message.

    An exception of several ranks lists the ranks' own between them.
    """
    lines = []
    for line in message.splitlines():
        if line.strip():
            lines.append(line)
    if not lines:
        return ""
    if len(lines) == 1:
        return lines[0]
    return f"{lines[0]} ... {lines[-1]}"


def _paths_runs(_cell: Cell, driver: type[Driver]) -> Scenario:
    """Return the runs ``named``, ``reopened`` and ``blocked``.

    The last ends with the build of the trainer if the trainer knows the directory then.
    """
    if driver.knows_directory:
        return PATHS_AT_BUILD
    return PATHS


@check(
    scenario=_paths_runs,
    costly=True,
    until=(("named", "step", 1), ("reopened", "step", 0), ("blocked", "damage", 0)),
    order=14,
    not_applicable=only_where_it_differs,
    depends_on=frozenset(),
    raises=("blocked",),
)
def paths(cell: Cell, trace: Trace) -> Iterator[str]:
    """Check that a save to and a load from a directory with an unusual name restore everything.

    They do bit by bit. The name has spaces, parent directories, non-ASCII letters,
    ``pytorch_model_fsdp`` and ``optimizer``. Where a file is in the directory's place, an error
    names it: in the save, and before the first step if the trainer knows it when built.

    If it fails: a file is probably found by a word anywhere in its path
    (https://github.com/huggingface/accelerate/pull/4119), or nobody looks at the directory before
    hours of training.
    """
    named = trace.run("named")
    reopened = trace.run("reopened")
    saved = named.at("save")
    loaded = reopened.at("load")
    when = f"after the load from {NAMED_RUN.directory!r}"
    yield from every_rank(saved, cell.world_size, "save")
    yield from every_rank(loaded, cell.world_size, "load")
    if not flat_parameters(saved):
        yield from differences(values(named, saved), values(reopened, loaded), when)
    yield from settings(saved, loaded, when)
    yield from _blocked(trace.run("blocked"))


def _blocked(run: RunTrace) -> Iterator[str]:
    """Yield a finding unless the run ends in an error in time that names the directory."""
    problem = f"a file is where the checkpoint's directory {BLOCKED_RUN.directory!r} should be"
    end = run.end
    if end is None and not run.at("step"):
        built = "the trainer was built without an error"
        yield f"{problem}: {built}, although it knows then where to save"
    elif end is None or (run.at("save") and end.action != "save"):
        yield f"{problem}: nothing was raised in the save, and training {_later(end)}"
    elif BLOCKED_RUN.directory not in without_frames(end.text):
        yield f"{problem}: the error does not name it: {short(end.message)}"
