"""Runs in the store of a session, for its report: how each ended, and which cells read it.

A *run* is one process group from start to end. All processes of a session, pytest-xdist's workers
too, put runs into one directory, the store. Each run has a directory there: ``request.json`` says
what the ranks must do, the logs of the ranks have what they recorded, and ``run.json``
(``runner.DONE``) is written last and says how the run ended.

When a session ends, ``plugin.reporting.results`` calls ``read_store`` and ``add_evidence``. The
latter adds the runs to the report, and the evidence of its training to the row of each cell. A cell
is one point of the test matrix, such as ``fsdp2-bf16_upcast-w2``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_distcompat.cell import Cell
from pytest_distcompat.decode import decode
from pytest_distcompat.evidence.cells import add_training
from pytest_distcompat.excerpt import excerpt
from pytest_distcompat.report.document import Report
from pytest_distcompat.report.result import Row
from pytest_distcompat.run_paths import SuitePayload
from pytest_distcompat.runner import DONE, read_run
from pytest_distcompat.scenario import Run
from pytest_distcompat.spread import Hosts
from pytest_distcompat.trace import RunTrace

#: Text about a rank -> how many characters of it a report has at most.
TEXT_LIMITS = {"message": 500, "text": 3500, "stack": 3500, "collectives": 1000, "output": 1000}
#: The most ranks of a run that a report shows.
MAX_RANKS = 8


#: The names of runs whose curves a report shows beside those of the training: the resumed run, the
#: reference in one process, and the reference under autocast.
_COMPARED = ("resume", "reference", "rounded")


@dataclass(frozen=True)
class Training:
    """What a run trains in.

    Attributes:
        cell: The id of its cell.
        ranks: How many data-parallel ranks have the batches that it trains on. One process trains
            on those of all ranks as their reference.
    """

    cell: str
    ranks: int


@dataclass(frozen=True)
class StoredRun:
    """One run in the store, without its snapshots.

    A session has hundreds of runs, and the snapshots of a training are many megabytes.

    Attributes:
        directory: Where its files are.
        payload: What the ranks had to do: driver, cell, actions and directories.
        world_size: The number of its ranks.
        done: The content of ``run.json``: ``trace`` with its end, ``seconds``, ``ranks``,
            ``command``; empty for a run that has not ended.
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
        """Return the name of the run in its scenario: ``train`` or ``resume``."""
        return self.payload.run.name

    @property
    def training(self) -> Training:
        """Return what it trains in."""
        return Training(self.payload.cell, self.payload.ranks)

    def trace(self) -> RunTrace:
        """Return its trace. Raises FileNotFoundError for an unfinished run."""
        return read_run(self.directory)[0]

    def to_json(self) -> dict[str, Any]:
        """Return the run as plain data, as the JSON report has it."""
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
        """Return how it failed (the fields of ``trace.RunFailure``); empty if it did not."""
        if not self.done:
            return {}
        return self.done["trace"]["end"] or {}

    def _ending(self) -> str:
        """Return ``ok``, ``unfinished``, or how it failed: ``raised``, ``crashed`` or ``hung``."""
        end = self._end()
        if end:
            return str(end["kind"])
        if self.done:
            return "ok"
        return "unfinished"

    def _message(self) -> str:
        """Return the first line of the message of its failure; empty if there is none.

        In a run over several machines it also names the machines of the ranks.
        """
        lines = self._end().get("message", "").splitlines()
        if not lines:
            return ""
        hosts = decode(Hosts, self.done["trace"].get("hosts", {}))
        return hosts.name_in(excerpt(lines[0], 500))


def _rank_json(rank: Mapping[str, Any]) -> dict[str, Any]:
    """Return what ``run.json`` has about a rank, with long texts shortened."""
    data = dict(rank)
    for name, limit in TEXT_LIMITS.items():
        data[name] = excerpt(rank[name], limit)
    return data


def read_store(store: Path) -> list[StoredRun]:
    """Return the runs in a store, in the order in which they began.

    A run that cannot be read is left out.
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
    """Return the run in that directory."""
    request = json.loads((directory / "request.json").read_text(encoding="utf-8"))
    payload = decode(SuitePayload, request["payload"])
    done: dict[str, Any] = {}
    done_path = directory / DONE
    if done_path.exists():
        done = json.loads(done_path.read_text(encoding="utf-8"))
    return StoredRun(directory, payload, request["world_size"], done)


def add_evidence(report: Report, runs: Iterable[StoredRun], *, trainings: bool = True) -> None:
    """Add the runs to the report, and the ids of its runs to the row of each cell.

    Args:
        report: The report, which has a row for each cell.
        runs: The runs of the session.
        trainings: Whether to add the evidence of its training to each row, too.
    """
    stored_runs = list(runs)
    readable = _RunsByCell(stored_runs)
    report.runs = [run.to_json() for run in stored_runs]
    for row in report.rows:
        own_runs = readable.of(row.driver, Cell.parse(row.cell))
        row.runs = [run.id for run in own_runs]
        if trainings:
            _add_first_training(row, own_runs)


def _add_first_training(row: Row, runs: Iterable[StoredRun]) -> None:
    """Add the evidence of the cell's first training that ended to its row.

    It is compared with the last run of each name in ``_COMPARED``.
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


class _RunsByCell:
    """The runs of a session, found by the cell whose checks read them.

    Several cells may share a run: the reference of ``ddp-fp32-w2`` is that of ``fsdp2-fp32-w2``,
    too. A session may have thousands of cells and of runs, so that not each cell can be compared
    with each run. Few runs differ in how the cell of the run follows from that of the check
    (``Run.change_of_cell``): for each of these the run's cell is made once, and looked up.
    """

    def __init__(self, runs: Iterable[StoredRun]) -> None:
        self._by_id: dict[str, StoredRun] = {}
        #: The number of each run in the session.
        self._position: dict[str, int] = {}
        #: Driver -> change of the cell -> what a run trains in -> the runs.
        self._by_driver: dict[str, dict[Run, dict[Training, list[StoredRun]]]] = {}
        for position, run in enumerate(runs):
            self._by_id[run.id] = run
            self._position[run.id] = position
            by_change = self._by_driver.setdefault(run.payload.driver, {})
            by_training = by_change.setdefault(run.payload.run.change_of_cell, {})
            by_training.setdefault(run.training, []).append(run)

    def of(self, driver: str, cell: Cell) -> list[StoredRun]:
        """Return the runs that checks of a driver's cell read, in the order of the session."""
        found: list[StoredRun] = []
        for change, by_training in self._by_driver.get(driver, {}).items():
            training = _training_in(change, cell)
            if training is None:
                continue
            for run in by_training.get(training, ()):
                if self._follows(run, cell):
                    found.append(run)
        found.sort(key=lambda run: self._position[run.id])
        return found

    def _follows(self, stored: StoredRun, cell: Cell) -> bool:
        """Tell whether what the run loads was saved by a run of the cell; True if it loads nothing.

        A run that loads a checkpoint belongs to the cell of the run that saved it: its directory is
        in the path.
        """
        payload = stored.payload
        if not payload.run.after:
            return True
        for parent in payload.paths.load_from.parents:
            saved_by = self._by_id.get(parent.name)
            if saved_by is not None:
                asked_for = _training_in(saved_by.payload.run, cell)
                return asked_for == saved_by.training and self._follows(saved_by, cell)
        return False


def _training_in(run: Run, cell: Cell) -> Training | None:
    """Return what the run of a check's scenario would train in, given the cell of the check.

    It is None if the run is on a mesh into which the cell's ranks cannot be divided.
    """
    try:
        cell_of_run = run.cell(cell)
    except ValueError:
        return None
    return Training(cell_of_run.id, cell.dp_size)
