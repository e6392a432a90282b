"""Checks ``damage`` (a damaged checkpoint) and ``paths`` (a directory with an unusual name).

- ``damage``: loading a checkpoint with a truncated or missing file raises an error that names it.
- ``paths``: a checkpoint works in a directory with any name; if a file is in its place, an error
  names it.

``judge.judge`` calls a check once all its runs have ended. It gets a cell, one point of the test
matrix such as ``fsdp2-fp32-w2``, and a trace of the runs (a run is one process group from start to
end). For each rank and action a run has a snapshot, and ``end``: how it failed, None if it did not.
Some of these runs must fail. The check yields findings, such as ``file 'model.safetensors' is cut
in half: it was loaded without an error, and training went on``.

Arguments of the decorator ``check``: ``scenario`` has the runs that the check reads; ``until`` the
last snapshots that it needs, as (run, action, which one of that action, from 0); ``order`` its
place in lists; ``not_applicable`` returns why a cell does not have the check, or None;
``depends_on`` has the facets of a cell (precision, options, ...) on which the outcome depends, so
that of cells with equal facets the default profile tests only one; ``costly`` says that it needs
several runs of its own; ``raises`` names runs that may end in an exception, which the check itself
judges (a crash or a hang of them fails it at once). Both checks have ``only_where_it_differs``:
only cells in ``fp32`` whose options are about the model or its checkpoints have them, because other
options and precisions do not change which files a load looks for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePath

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks._base import check, every_rank
from pytest_distcompat.checks._elsewhere import only_where_it_differs
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

#: A frame of a traceback: a line ``File "..."``, and the lines below it that are indented further.
_FRAMES = re.compile(r'^( +)File ".*\n(?:\1  .*\n?)*', re.MULTILINE)
#: How rank 0 corrupted a file -> what the file is now. After the action ``damage`` the record of
#: the corrupted file (``FileInfo``) has the key of this dict in ``holds``.
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
    """Return the words for what training did in place of raising: ``went on``."""
    if end is None:
        return "went on"
    return f"failed in {end.action!r} only: {short(end.message)}"


def without_frames(text: str) -> str:
    """Return a traceback without its frames: they may name a file that the message does not."""
    return _FRAMES.sub("", text)


def short(message: str) -> str:
    """Return the first and the last line of an exception's message: ``first ... last``.

    The message of an exception of several ranks is long: it has those of the ranks in between.
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

    ``named`` saves, and ``reopened`` loads. In ``blocked`` a file is in the place of the directory.
    A trainer that is given the directory when it is built must raise then: ``blocked`` ends with
    the build. For others it goes on to a save.
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
    # FSDP1's flat parameters have no names by which they could be compared with those before.
    if not flat_parameters(saved):
        # Digests of whole tensors, put together from those of all ranks' parts.
        saved_values = values(named, saved)
        loaded_values = values(reopened, loaded)
        yield from differences(saved_values, loaded_values, when)
    # The numbers of schedulers and param groups.
    yield from settings(saved, loaded, when)
    yield from _blocked(trace.run("blocked"))


def _blocked(run: RunTrace) -> Iterator[str]:
    """Yield a finding unless the run raised in time, with an error that names the directory."""
    problem = f"a file is where the checkpoint's directory {BLOCKED_RUN.directory!r} should be"
    end = run.end
    # Only a run that is to end with the build takes no step (see ``_paths_runs``).
    if end is None and not run.at("step"):
        built = "the trainer was built without an error"
        yield f"{problem}: {built}, although it knows then where to save"
    # A rank has a snapshot after ``save`` only if its save raised nothing. An error in a later
    # action comes too late.
    elif end is None or (run.at("save") and end.action != "save"):
        yield f"{problem}: nothing was raised in the save, and training {_later(end)}"
    elif BLOCKED_RUN.directory not in without_frames(end.text):
        yield f"{problem}: the error does not name it: {short(end.message)}"
