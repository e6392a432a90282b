"""Runs in the store, whichever process started them: those in progress, how others ended, and which cells' checks read them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_distcompat import clock
from pytest_distcompat.cell import Cell
from pytest_distcompat.decode import decode
from pytest_distcompat.evidence.cells import add_training
from pytest_distcompat.excerpt import excerpt, name_nodes
from pytest_distcompat.launch.files import read_end
from pytest_distcompat.report.document import Report
from pytest_distcompat.run_paths import SuitePayload
from pytest_distcompat.runner import DONE, read_run
from pytest_distcompat.trace import RunTrace

#: The longest texts about a rank in a report, in characters; and the most ranks of a run.
TEXT_LIMITS = {"message": 500, "text": 3500, "stack": 3500, "collectives": 1000, "output": 1000}
MAX_RANKS = 8

#: How much of the end of a rank's log is read, in bytes: the events about actions are short.
TAIL_BYTES = 8192
#: How long after its time limit a run still counts as running, in seconds.
GRACE_S = 60.0

#: The runs that a report shows beside the training.
_COMPARED = ("resume", "reference", "rounded")


@dataclass(frozen=True)
class StoredRun:
    """One run in the store, without its snapshots: a session has hundreds of runs, and a training many megabytes.

    ``done`` is what the runner has written (``runner.DONE``); empty for a run that has not ended.
    """

    directory: Path
    asked: SuitePayload
    world_size: int
    done: Mapping[str, Any]

    @property
    def id(self) -> str:
        """Return the name of its directory."""
        return self.directory.name

    @property
    def name(self) -> str:
        """Return the name of the run in its scenario."""
        return self.asked.run.name

    def trace(self) -> RunTrace:
        """Return its trace. Raises FileNotFoundError for an unfinished run."""
        return read_run(self.directory)[0]

    def to_json(self) -> dict[str, Any]:
        """Return the run as reports have it."""
        end = (self.done["trace"]["end"] if self.done else None) or {}
        first = end.get("message", "").splitlines()
        return {
            "id": self.id,
            "driver": self.asked.driver,
            "cell": self.asked.cell,
            "name": self.name,
            "world_size": self.world_size,
            "seconds": round(self.done.get("seconds", 0.0), 3),
            "ending": end["kind"] if end else "ok" if self.done else "unfinished",
            "action": end.get("action", ""),
            "message": name_nodes(excerpt(first[0], 500), self.done["trace"].get("nodes", ())) if first else "",
            "ranks": [
                {**one, **{name: excerpt(one[name], most) for name, most in TEXT_LIMITS.items()}}
                for one in self.done.get("ranks", ())[:MAX_RANKS]
            ],
            "command": self.done.get("command", ""),
        }


def read_store(store: Path) -> list[StoredRun]:
    """Return the runs in that directory, in the order in which they began, without those that cannot be read."""
    runs = []
    paths = list(store.glob("*/request.json"))
    for path in sorted(paths, key=lambda path: path.stat().st_mtime_ns):
        try:
            request, written = json.loads(path.read_text(encoding="utf-8")), path.with_name(DONE)
            done = json.loads(written.read_text(encoding="utf-8")) if written.exists() else {}
            runs.append(StoredRun(path.parent, decode(SuitePayload, request["payload"]), request["world_size"], done))
        except (OSError, ValueError, KeyError, TypeError):
            # The files of a run that begins or ends at this moment, after an interruption, are incomplete.
            continue
    return runs


def add_evidence(report: Report, runs: Iterable[StoredRun], *, trainings: bool = True) -> None:
    """Add the runs to the report, and to each cell the ids of its runs; with ``trainings`` also the evidence of its training."""
    stored = list(runs)
    by_id = {run.id: run for run in stored}
    report.runs = [run.to_json() for run in stored]
    for row in report.rows:
        cell = Cell.parse(row.cell)
        own = [run for run in stored if run.asked.driver == row.driver and _is_for(run, cell, by_id)]
        row.runs = [run.id for run in own]
        trained = next((run for run in own if run.name == "train" and run.done), None)
        if trained is not None and trainings:
            others = {run.name: run for run in own if run.name in _COMPARED and run.done}
            add_training(row, trained.trace(), *(run.trace() for run in others.values()))


def _is_for(stored: StoredRun, cell: Cell, by_id: Mapping[str, StoredRun]) -> bool:
    """Tell whether checks of that cell read the run. Several cells may share one that follows no other."""
    # ``ranks`` are the data-parallel ranks of the cell whose checks need the run.
    asked = stored.asked
    try:
        own = asked.run.cell(cell)
    except ValueError:
        # Another cell's run, on a mesh into which this cell's ranks cannot be divided.
        return False
    if own.id != asked.cell or asked.ranks != cell.dp_size:
        return False
    if not asked.run.after:
        return True
    # A run that loads another one's checkpoint belongs to that one's cell.
    earlier = next((by_id[parent.name] for parent in asked.paths.load_from.parents if parent.name in by_id), None)
    return earlier is not None and _is_for(earlier, cell, by_id)


@dataclass(frozen=True)
class Running:
    """Run in progress: the ``action`` of rank 0, and its number among ``actions``, from 1; 0 before the first."""

    cell: str
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
            yield Running(asked.cell, asked.run.name, *position, seconds, request["timeout"])


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
