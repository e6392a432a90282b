"""Which runs of a session are in progress, for the line that the terminal shows.

A *run* is one process group from start to end. All processes of a session put their runs into one
directory, the store. Each run has a directory there, with ``request.json`` (what its ranks must
do), a log of each rank, and at its end ``run.json`` (``runner.DONE``).

A thread of ``plugin.reporting.progress`` calls ``running`` every moment, and shows the result:
``fsdp2-fp32-w2 train: step 7/28, 3 s of 300 s``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pytest_distcompat import clock
from pytest_distcompat.decode import decode
from pytest_distcompat.launch.files import read_end
from pytest_distcompat.run_paths import SuitePayload
from pytest_distcompat.runner import DONE

#: How much of the end of a rank's log is read, in bytes. Events about actions are short.
TAIL_BYTES = 8192
#: How long after its time limit a run still counts as running, in seconds.
GRACE_S = 60.0


@dataclass(frozen=True)
class Running:
    """A run in progress.

    Attributes:
        cell: The id of its cell, one point of the test matrix: ``fsdp2-fp32-w2``.
        run: The name of the run in its scenario: ``train``.
        action: The action of rank 0: ``step``; empty before its first action.
        number: The number of that action, from 1; 0 before the first.
        actions: How many actions the run has.
        seconds: How long it has run.
        timeout: How many seconds it may run.
    """

    cell: str
    run: str
    action: str
    number: int
    actions: int
    seconds: float
    timeout: float

    def __str__(self) -> str:
        """Return a line for the user: ``fsdp2-fp32-w2 train: step 7/28, 3 s of 300 s``."""
        progress = "starts"
        if self.number:
            progress = f"{self.action} {self.number}/{self.actions}"
        time = f"{self.seconds:.0f} s of {self.timeout:g} s"
        return f"{self.cell} {self.run}: {progress}, {time}"


def running(store: Path, ended: set[str], since: float = 0.0) -> Iterator[Running]:
    """Yield the runs in a store that are in progress.

    Args:
        store: The directory of the runs.
        ended: The names of runs that are known to have ended, which are not read again. Names are
            added to it.
        since: When the session began, in seconds since the epoch. Runs of an earlier session, which
            may have been killed, are left out.
    """
    try:
        names = sorted(path.name for path in store.iterdir())
    except FileNotFoundError:
        return
    for name in names:
        directory = store / name
        # Beside the directory of a run is the lock of the process that starts it.
        if name in ended or name.endswith(".lock"):
            continue
        if (directory / DONE).exists():
            ended.add(name)
            continue
        request_path = directory / "request.json"
        try:
            begun = request_path.stat().st_mtime
            request = json.loads(request_path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            # The run waits for its devices, or the file is being written.
            continue
        seconds = max(0.0, clock.wall() - begun)
        # A run whose pytest process died never ends, so it counts until its time limit only.
        if begun >= since and seconds < request["timeout"] + GRACE_S:
            payload = decode(SuitePayload, request["payload"])
            current = _last_action(directory / "rank-0.jsonl")
            yield Running(
                payload.cell,
                payload.run.name,
                current.name,
                current.index + 1,
                len(payload.run.actions),
                seconds,
                request["timeout"],
            )


@dataclass(frozen=True)
class _Action:
    """The last action that a rank has begun. The defaults are those before the first action."""

    #: The action: ``step``.
    name: str = ""
    #: Its number in the run, from 0.
    index: int = -1


def _last_action(log: Path) -> _Action:
    """Return the last action that a rank has begun, from the end of its log of JSON lines."""
    lines = read_end(log, TAIL_BYTES).splitlines()
    for line in reversed(lines):
        if '"event": "action"' in line:
            try:
                event = json.loads(line)
            except ValueError:
                # The first line read may be cut, and the last one may be incomplete.
                continue
            return _Action(str(event["action"]), int(event["index"]))
    return _Action()
