"""Runs in the store: how they ended, and which cells' checks read them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_distcompat.cell import Cell
from pytest_distcompat.decode import decode
from pytest_distcompat.evidence.cells import training
from pytest_distcompat.excerpt import excerpt
from pytest_distcompat.report import Report
from pytest_distcompat.run_paths import SuitePayload
from pytest_distcompat.runner import DONE, read_run
from pytest_distcompat.scenario import Run
from pytest_distcompat.trace import RunTrace

#: The longest texts about a rank in a report, in characters; and the most ranks of a run.
TEXT_LIMITS = {"message": 500, "text": 3500, "stack": 3500, "collectives": 1000, "output": 1000}
MAX_RANKS = 8

#: The runs that a report shows beside the training.
_COMPARED = ("resume", "reference", "rounded")


@dataclass(frozen=True)
class StoredRun:
    """One run in the store, without its snapshots: a session has hundreds of runs, and a training many megabytes.

    ``cell`` is the cell that it ran in, ``ranks`` the world size of the cell whose checks need it, ``load_from`` the directory of
    the checkpoint that it loads. ``done``: it ended, and was not interrupted with its session. ``end`` has the fields of
    the RunFailure of a run that failed, ``rank_reports`` those of its ranks (``runner``).
    """

    directory: Path
    driver: str
    cell: str
    run: Run
    ranks: int
    world_size: int
    load_from: Path
    done: bool
    end: Mapping[str, Any] | None
    rank_reports: Sequence[Mapping[str, Any]]
    seconds: float
    command: str

    @property
    def id(self) -> str:
        """Return the name of its directory."""
        return self.directory.name

    def trace(self) -> RunTrace:
        """Return its trace. Raises FileNotFoundError for an unfinished run."""
        return read_run(self.directory)[0]

    def to_json(self) -> dict[str, Any]:
        """Return the run as reports have it."""
        end = self.end or {}
        first = end.get("message", "").splitlines()
        return {
            "id": self.id,
            "driver": self.driver,
            "cell": self.cell,
            "name": self.run.name,
            "world_size": self.world_size,
            "seconds": round(self.seconds, 3),
            "ending": end["kind"] if end else "ok" if self.done else "unfinished",
            "action": end.get("action", ""),
            "message": excerpt(first[0], 500) if first else "",
            "ranks": [
                {**one, **{name: excerpt(one[name], most) for name, most in TEXT_LIMITS.items()}}
                for one in self.rank_reports[:MAX_RANKS]
            ],
            "command": self.command,
        }


def read_store(store: Path) -> list[StoredRun]:
    """Return the runs in that directory, in the order in which they began, without those that cannot be read."""
    runs = []
    paths = list(store.glob("*/request.json"))
    for path in sorted(paths, key=lambda path: path.stat().st_mtime_ns):
        try:
            runs.append(_stored(path))
        except (OSError, ValueError, KeyError, TypeError):
            # The files of a run that begins or ends at this moment, after an interruption, are incomplete.
            continue
    return runs


def _stored(path: Path) -> StoredRun:
    request = json.loads(path.read_text(encoding="utf-8"))
    asked, written = decode(SuitePayload, request["payload"]), path.with_name(DONE)
    done = json.loads(written.read_text(encoding="utf-8")) if written.exists() else {}
    return StoredRun(
        directory=path.parent,
        driver=asked.driver,
        cell=asked.cell,
        run=asked.run,
        ranks=asked.ranks,
        world_size=request["world_size"],
        load_from=asked.paths.load_from,
        done=bool(done),
        end=done["trace"]["end"] if done else None,
        rank_reports=done.get("ranks", ()),
        seconds=done.get("seconds", 0.0),
        command=done.get("command", ""),
    )


def add_evidence(report: Report, runs: Iterable[StoredRun]) -> None:
    """Add the runs to the report, and to each cell the ids of its runs and the evidence of its training."""
    stored = list(runs)
    by_id = {run.id: run for run in stored}
    report.runs = [run.to_json() for run in stored]
    for row in report.rows:
        cell = Cell.parse(row.cell)
        own = [run for run in stored if run.driver == row.driver and _is_for(run, cell, by_id)]
        row.runs = [run.id for run in own]
        trained = next((run for run in own if run.run.name == "train" and run.done), None)
        if trained is not None:
            others = {run.run.name: run for run in own if run.run.name in _COMPARED and run.done}
            evidence = training(cell, trained.trace(), *(run.trace() for run in others.values()))
            for name, value in dataclasses.asdict(evidence).items():
                setattr(row, name, value)


def _is_for(stored: StoredRun, cell: Cell, by_id: Mapping[str, StoredRun]) -> bool:
    """Tell whether checks of that cell read the run. Several cells may share one that follows no other."""
    run_cell = stored.run.cell(cell)
    if run_cell.id != stored.cell or stored.ranks != cell.world_size:
        return False
    if not stored.run.after:
        return True
    # A run that loads another one's checkpoint belongs to that one's cell.
    earlier = next((by_id[parent.name] for parent in stored.load_from.parents if parent.name in by_id), None)
    return earlier is not None and _is_for(earlier, cell, by_id)
