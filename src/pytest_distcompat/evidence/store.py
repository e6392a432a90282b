"""Runs in the store, whichever process started them.

Those in progress, how others ended, and which cells' checks read them.
"""

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
from pytest_distcompat.excerpt import excerpt
from pytest_distcompat.launch.files import read_end
from pytest_distcompat.report.document import Report
from pytest_distcompat.report.result import Row
from pytest_distcompat.run_paths import SuitePayload
from pytest_distcompat.runner import DONE, read_run
from pytest_distcompat.spread import Hosts
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
    """One run in the store, without its snapshots.

    A session has hundreds of runs, and the snapshots of a training are many megabytes.

    Attributes:
        directory: Where its files are.
        payload: What the ranks were asked to do.
        world_size: The number of its ranks.
        done: What the runner has written (``runner.DONE``); empty for a run that has not ended.
    """

    directory: Path
    payload: SuitePayload
    world_size: int
    done: Mapping[str, Any]

    @property
    def id(self) -> str:
        """Return the name of its directory."""
        return self.directory.name

    @property
    def name(self) -> str:
        """Return the name of the run in its scenario."""
        return self.payload.run.name

    def trace(self) -> RunTrace:
        """Return its trace. Raises FileNotFoundError for an unfinished run."""
        return read_run(self.directory)[0]

    def to_json(self) -> dict[str, Any]:
        """Return the run as reports have it."""
        end = self._end()
        ranks = self.done.get("ranks", ())[:MAX_RANKS]
        return {
            "id": self.id,
            "driver": self.payload.driver,
            "cell": self.payload.cell,
            "name": self.name,
            "world_size": self.world_size,
            "seconds": round(self.done.get("seconds", 0.0), 3),
            "ending": self._ending(),
            "action": end.get("action", ""),
            "message": self._message(),
            "ranks": [_rank_json(rank) for rank in ranks],
            "command": self.done.get("command", ""),
        }

    def _end(self) -> Mapping[str, Any]:
        """Return how it ended early; empty for a run that did not."""
        if not self.done:
            return {}
        return self.done["trace"]["end"] or {}

    def _ending(self) -> str:
        end = self._end()
        if end:
            return str(end["kind"])
        if self.done:
            return "ok"
        return "unfinished"

    def _message(self) -> str:
        """Return the first line of the message with which it ended early.

        The line has the machines of the ranks. Empty if there is no message.
        """
        lines = self._end().get("message", "").splitlines()
        if not lines:
            return ""
        hosts = decode(Hosts, self.done["trace"].get("hosts", {}))
        return hosts.name_in(excerpt(lines[0], 500))


def _rank_json(rank: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is known about a rank, with its texts no longer than ``TEXT_LIMITS``."""
    data = dict(rank)
    for name, limit in TEXT_LIMITS.items():
        data[name] = excerpt(rank[name], limit)
    return data


def read_store(store: Path) -> list[StoredRun]:
    """Return the runs in that directory, in the order in which they began.

    Those that cannot be read are left out.
    """
    paths = list(store.glob("*/request.json"))
    paths.sort(key=lambda path: path.stat().st_mtime_ns)
    runs = []
    for path in paths:
        try:
            runs.append(_read_stored(path.parent))
        except (OSError, ValueError, KeyError, TypeError):
            # The files of a run that begins or ends at this moment, after an interruption, are
            # incomplete.
            continue
    return runs


def _read_stored(directory: Path) -> StoredRun:
    request = json.loads((directory / "request.json").read_text(encoding="utf-8"))
    payload = decode(SuitePayload, request["payload"])
    done: dict[str, Any] = {}
    done_path = directory / DONE
    if done_path.exists():
        done = json.loads(done_path.read_text(encoding="utf-8"))
    return StoredRun(directory, payload, request["world_size"], done)


def add_evidence(report: Report, runs: Iterable[StoredRun], *, trainings: bool = True) -> None:
    """Add the runs to the report, and to each cell the ids of its runs.

    With ``trainings`` each cell also gets the evidence of its training.
    """
    stored_runs = list(runs)
    by_id = {run.id: run for run in stored_runs}
    report.runs = [run.to_json() for run in stored_runs]
    for row in report.rows:
        cell = Cell.parse(row.cell)
        own_runs: list[StoredRun] = []
        for run in stored_runs:
            if run.payload.driver == row.driver and _is_for(run, cell, by_id):
                own_runs.append(run)
        row.runs = [run.id for run in own_runs]
        if trainings:
            _add_first_training(row, own_runs)


def _add_first_training(row: Row, runs: Iterable[StoredRun]) -> None:
    """Add the evidence of the cell's first training that ended.

    Beside it stands the last run of each name that is shown with a training.
    """
    training = None
    compared: dict[str, StoredRun] = {}
    for run in runs:
        if not run.done:
            continue
        if run.name == "train" and training is None:
            training = run
        if run.name in _COMPARED:
            compared[run.name] = run
    if training is not None:
        compared_traces = [run.trace() for run in compared.values()]
        add_training(row, training.trace(), *compared_traces)


def _is_for(stored: StoredRun, cell: Cell, by_id: Mapping[str, StoredRun]) -> bool:
    """Tell whether checks of that cell read the run.

    Several cells may share a run that follows no other.
    """
    payload = stored.payload
    try:
        cell_of_run = payload.run.cell(cell)
    except ValueError:
        # Another cell's run, on a mesh into which this cell's ranks cannot be divided.
        return False
    # ``ranks`` are the data-parallel ranks of the cell whose checks need the run.
    if cell_of_run.id != payload.cell or payload.ranks != cell.dp_size:
        return False
    if not payload.run.after:
        return True
    # A run that loads another one's checkpoint belongs to that one's cell.
    for parent in payload.paths.load_from.parents:
        if parent.name in by_id:
            return _is_for(by_id[parent.name], cell, by_id)
    return False


@dataclass(frozen=True)
class Running:
    """Run in progress.

    Attributes:
        cell: The cell's id.
        run: The name of the run in its scenario.
        action: What rank 0 does; empty before its first action.
        number: The number of that action, from 1; 0 before the first.
        actions: How many there are.
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
        """Return a line for the user: ``fsdp2-fp32-w2 train: step 7/27, 3 s of 300 s``."""
        progress = "starts"
        if self.number:
            progress = f"{self.action} {self.number}/{self.actions}"
        time = f"{self.seconds:.0f} s of {self.timeout:g} s"
        return f"{self.cell} {self.run}: {progress}, {time}"


def running(store: Path, ended: set[str], since: float = 0.0) -> Iterator[Running]:
    """Yield the runs in the store that have begun after ``since`` and not ended.

    ``since`` is in seconds since the epoch.

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
        request_path = directory / "request.json"
        try:
            begun = request_path.stat().st_mtime
            request = json.loads(request_path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue  # it waits for its devices, or is being written
        seconds = max(0.0, clock.wall() - begun)
        # A run whose pytest process died never ends.
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
    """An action that a rank has begun, and its index in the run.

    An empty name and -1 before the first.
    """

    name: str = ""
    index: int = -1


def _last_action(log: Path) -> _Action:
    """Return the last action that a rank has begun, by the end of its log."""
    lines = read_end(log, TAIL_BYTES).splitlines()
    for line in reversed(lines):
        if '"event": "action"' in line:
            try:
                event = json.loads(line)
            except ValueError:
                continue
            return _Action(str(event["action"]), int(event["index"]))
    return _Action()
