"""The runs that run at this moment, seen from outside: by the files in the store, whichever process started them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pytest_distcompat import clock
from pytest_distcompat.launch.request import read_end
from pytest_distcompat.runner import DONE

#: The end of a rank's log that is read: the events that say where it is are short.
TAIL = 8192
#: How long after its time limit a run is no longer believed to run, in seconds.
PATIENCE = 60.0


@dataclass(frozen=True)
class Running:
    """A run in progress: what rank 0 does (``action``), and which of ``actions`` it is, from 1; 0 before the first."""

    cell: str
    driver: str
    run: str
    action: str
    place: int
    actions: int
    seconds: float

    def __str__(self) -> str:
        """As the user reads it: ``fsdp2-fp32-w2 train: step 7/27, 3 s``."""
        where = f"{self.action} {self.place}/{self.actions}" if self.place else "starts"
        return f"{self.cell} {self.run}: {where}, {self.seconds:.0f} s"


def running(store: Path, over: set[str], since: float = 0.0) -> Iterator[Running]:
    """The runs in the store that have begun, after ``since`` (in seconds since the epoch), and not ended.

    ``over`` keeps the names of those that have ended, so that they are not looked at again.
    """
    try:
        names = sorted(path.name for path in store.iterdir())
    except FileNotFoundError:
        return
    for name in names:
        directory = store / name
        if name in over or name.endswith(".lock"):
            continue
        if (directory / DONE).exists():
            over.add(name)
            continue
        try:
            begun = (directory / "request.json").stat().st_mtime
            request = json.loads((directory / "request.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue  # it waits for its devices, or is being written
        seconds = max(0.0, clock.wall() - begun)
        # One whose pytest process died leaves no end.
        if begun >= since and seconds < request["timeout"] + PATIENCE:
            payload, (action, index) = request["payload"], _action(directory / "rank-0.jsonl")
            run = payload["run"]
            yield Running(
                payload["cell"], payload["driver"], run["name"], action, index + 1, len(run["actions"]), seconds
            )


def _action(log: Path) -> tuple[str, int]:
    """The last action that a rank said it begins, and its index; nothing and -1 if it said none yet."""
    for line in reversed(read_end(log, TAIL).splitlines()):
        if '"event": "action"' in line:
            try:
                event = json.loads(line)
            except ValueError:
                continue
            return str(event["action"]), int(event["index"])
    return "", -1
