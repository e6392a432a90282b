"""The runs in the store: which there were, how they ended, and which cell's checks read them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_distcompat.cell import Cell
from pytest_distcompat.evidence.cells import training
from pytest_distcompat.excerpt import excerpt
from pytest_distcompat.report import Report
from pytest_distcompat.runner import DONE, read_run
from pytest_distcompat.scenario import Run
from pytest_distcompat.trace import RunTrace

#: How much is kept of what is told of a rank, in characters, and of how many ranks.
KEPT = {"message": 500, "text": 3500, "stack": 3500, "collectives": 1000, "output": 1000}
RANKS = 8


@dataclass(frozen=True)
class StoredRun:
    """One run in the store, without its snapshots: a run has hundreds of runs, and a run of a model's training many megabytes.

    ``cell`` is the one that it ran in, ``ranks`` the world size of the cell that it was run for, ``found`` the directory of the
    checkpoint that it went on from. ``done``: whether it came to an end at all, and was not broken off with its session;
    ``end`` is what ``runner`` kept of an end that was none of the good ones, and ``told`` what of its ranks.
    """

    directory: Path
    driver: str
    cell: str
    run: Run
    ranks: int
    world_size: int
    found: Path
    done: bool
    end: Mapping[str, Any] | None
    told: Sequence[Mapping[str, Any]]
    seconds: float
    command: str

    @property
    def id(self) -> str:
        """The name of its directory."""
        return self.directory.name

    def trace(self) -> RunTrace:
        """Its snapshots. Raises FileNotFoundError for one that was broken off."""
        return read_run(self.directory)[0]

    def to_json(self) -> dict[str, Any]:
        """What the reports say of it."""
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
                {**one, **{name: excerpt(one[name], most) for name, most in KEPT.items()}} for one in self.told[:RANKS]
            ],
            "command": self.command,
        }


def read_store(store: Path) -> list[StoredRun]:
    """All runs in that directory, in the order in which they began; what cannot be read is left out."""
    runs = []
    paths = list(store.glob("*/request.json"))
    for path in sorted(paths, key=lambda path: path.stat().st_mtime_ns):
        try:
            runs.append(_stored(path))
        except (OSError, ValueError, KeyError, TypeError):
            # a run that begins or ends at this snapshot, after an interruption: its files are not whole.
            continue
    return runs


def _stored(path: Path) -> StoredRun:
    request = json.loads(path.read_text(encoding="utf-8"))
    payload, written = request["payload"], path.with_name(DONE)
    told = payload["run"]
    done = json.loads(written.read_text(encoding="utf-8")) if written.exists() else {}
    only = None if told["only"] is None else tuple(told["only"])
    return StoredRun(
        directory=path.parent,
        driver=payload["driver"],
        cell=payload["cell"],
        run=Run(**{**told, "actions": tuple(told["actions"]), "only": only}),
        ranks=payload["ranks"],
        world_size=request["world_size"],
        found=Path(payload["load_from"]),
        done=bool(done),
        end=done["trace"]["end"] if done else None,
        told=done.get("ranks", ()),
        seconds=done.get("seconds", 0.0),
        command=done.get("command", ""),
    )


def add_evidence(report: Report, runs: Iterable[StoredRun]) -> None:
    """Put the runs into the report; into each cell which ones it read, and what its training showed."""
    stored = list(runs)
    by_id = {run.id: run for run in stored}
    report.runs = [run.to_json() for run in stored]
    for row in report.rows:
        cell = Cell.parse(row.cell)
        own = [run for run in stored if run.driver == row.driver and _is_for(run, cell, by_id)]
        row.runs = [run.id for run in own]
        trained = next((run for run in own if run.run.name == "train" and run.done), None)
        reference = next((run for run in own if run.run.name == "reference" and run.done), None)
        if trained is not None:
            shown = training(cell, trained.trace(), reference.trace() if reference else None)
            for name, value in dataclasses.asdict(shown).items():
                setattr(row, name, value)


def _is_for(stored: StoredRun, cell: Cell, by_id: Mapping[str, StoredRun]) -> bool:
    """Whether checks of that cell read the run; one that follows no other may be shared by several cells."""
    there = stored.run.cell(cell)
    if there.id != stored.cell or stored.ranks != cell.world_size:
        return False
    if not stored.run.after:
        return True
    # One that goes on from another's checkpoint belongs to the cell of that one, wherever it runs itself.
    earlier = next((by_id[parent.name] for parent in stored.found.parents if parent.name in by_id), None)
    return earlier is not None and _is_for(earlier, cell, by_id)
