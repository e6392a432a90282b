"""Runs in progress, whichever process started them, according to the files in the store."""

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

#: How much of the end of a rank's log is read, in bytes: the events about actions are short.
TAIL_BYTES = 8192
#: How long after its time limit a run still counts as running, in seconds.
GRACE_S = 60.0


@dataclass(frozen=True)
class Running:
    """Run in progress: the ``action`` of rank 0, and its number among ``actions``, from 1; 0 before the first."""

    cell: str
    driver: str
    run: str
    action: str
    number: int
    actions: int
    seconds: float
    timeout: float

    def __str__(self) -> str:
        """Return a line for the user: ``fsdp2-fp32-w2 train: step 7/27, 3 s of 300 s``."""
        where = f"{self.action} {self.number}/{self.actions}" if self.number else "starts"
        return f"{self.cell} {self.run}: {where}, {self.seconds:.0f} s of {self.timeout:g} s"


def running(store: Path, ended: set[str], since: float = 0.0) -> Iterator[Running]:
    """Yield the runs in the store that have begun after ``since`` (seconds since the epoch) and not ended.

    ``ended`` collects the names of those that have ended, so that they are not read again.
    """
    try:
        names = sorted(path.name for path in store.iterdir())
    except FileNotFoundError:
        return
    for name in names:
        directory = store / name
        if name in ended or name.endswith(".lock"):
            continue
        if (directory / DONE).exists():
            ended.add(name)
            continue
        try:
            begun = (directory / "request.json").stat().st_mtime
            request = json.loads((directory / "request.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue  # it waits for its devices, or is being written
        seconds = max(0.0, clock.wall() - begun)
        # A run whose pytest process died never ends.
        if begun >= since and seconds < request["timeout"] + GRACE_S:
            asked, (action, index) = decode(SuitePayload, request["payload"]), _action(directory / "rank-0.jsonl")
            position = (action, index + 1, len(asked.run.actions))
            yield Running(asked.cell, asked.driver, asked.run.name, *position, seconds, request["timeout"])


def _action(log: Path) -> tuple[str, int]:
    """Return the last action that a rank has begun, and its index; an empty text and -1 before the first."""
    for line in reversed(read_end(log, TAIL_BYTES).splitlines()):
        if '"event": "action"' in line:
            try:
                event = json.loads(line)
            except ValueError:
                continue
            return str(event["action"]), int(event["index"])
    return "", -1
