"""The lives in the store: which there were, how they ended, and which cell's checks read them."""

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
from pytest_distcompat.runner import DONE, read_life
from pytest_distcompat.scenario import Life
from pytest_distcompat.trace import LifeTrace

#: How much is kept of what is told of a rank, in characters, and of how many ranks.
KEPT = {"message": 500, "text": 3500, "stack": 3500, "collectives": 1000, "output": 1000}
RANKS = 8


@dataclass(frozen=True)
class StoredLife:
    """One life in the store, without its moments: a run has hundreds of lives, and a life of a model's training many megabytes.

    ``cell`` is the one that it ran in, ``ranks`` the world size of the cell that it was run for, ``found`` the directory of the
    checkpoint that it went on from. ``done``: whether it came to an end at all, and was not broken off with its session;
    ``end`` is what ``runner`` kept of an end that was none of the good ones, and ``told`` what of its ranks.
    """

    directory: Path
    driver: str
    cell: str
    life: Life
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

    def trace(self) -> LifeTrace:
        """Its moments. Raises FileNotFoundError for one that was broken off."""
        return read_life(self.directory)[0]

    def to_json(self) -> dict[str, Any]:
        """What the reports say of it."""
        end = self.end or {}
        first = end.get("message", "").splitlines()
        return {
            "id": self.id,
            "driver": self.driver,
            "cell": self.cell,
            "name": self.life.name,
            "world_size": self.world_size,
            "seconds": round(self.seconds, 3),
            "ending": end["kind"] if end else "ok" if self.done else "unfinished",
            "verb": end.get("verb", ""),
            "message": excerpt(first[0], 500) if first else "",
            "ranks": [
                {**one, **{name: excerpt(one[name], most) for name, most in KEPT.items()}} for one in self.told[:RANKS]
            ],
            "command": self.command,
        }


def read_store(store: Path) -> list[StoredLife]:
    """All lives in that directory, in the order in which they began; what cannot be read is left out."""
    lives = []
    paths = list(store.glob("*/request.json"))
    for path in sorted(paths, key=lambda path: path.stat().st_mtime_ns):
        try:
            lives.append(_stored(path))
        except (OSError, ValueError, KeyError, TypeError):
            # A life that begins or ends at this moment, after an interruption: its files are not whole.
            continue
    return lives


def _stored(path: Path) -> StoredLife:
    request = json.loads(path.read_text(encoding="utf-8"))
    payload, written = request["payload"], path.with_name(DONE)
    told = payload["life"]
    done = json.loads(written.read_text(encoding="utf-8")) if written.exists() else {}
    only = None if told["only"] is None else tuple(told["only"])
    return StoredLife(
        directory=path.parent,
        driver=payload["driver"],
        cell=payload["cell"],
        life=Life(**{**told, "verbs": tuple(told["verbs"]), "only": only}),
        ranks=payload["ranks"],
        world_size=request["world_size"],
        found=Path(payload["load_from"]),
        done=bool(done),
        end=done["trace"]["end"] if done else None,
        told=done.get("ranks", ()),
        seconds=done.get("seconds", 0.0),
        command=done.get("command", ""),
    )


def add_evidence(report: Report, lives: Iterable[StoredLife]) -> None:
    """Put the lives into the report; into each cell which ones it read, and what its training showed."""
    stored = list(lives)
    by_id = {life.id: life for life in stored}
    report.lives = [life.to_json() for life in stored]
    for row in report.rows:
        cell = Cell.parse(row.cell)
        own = [life for life in stored if life.driver == row.driver and _is_for(life, cell, by_id)]
        row.lives = [life.id for life in own]
        trained = next((life for life in own if life.life.name == "train" and life.done), None)
        reference = next((life for life in own if life.life.name == "reference" and life.done), None)
        if trained is not None:
            shown = training(cell, trained.trace(), reference.trace() if reference else None)
            for name, value in dataclasses.asdict(shown).items():
                setattr(row, name, value)


def _is_for(stored: StoredLife, cell: Cell, by_id: Mapping[str, StoredLife]) -> bool:
    """Whether checks of that cell read the life; one that follows no other may be shared by several cells."""
    there = stored.life.cell(cell)
    if there.id != stored.cell or stored.ranks != cell.world_size:
        return False
    if not stored.life.after:
        return True
    # One that goes on from another's checkpoint belongs to the cell of that one, wherever it runs itself.
    earlier = next((by_id[parent.name] for parent in stored.found.parents if parent.name in by_id), None)
    return earlier is not None and _is_for(earlier, cell, by_id)
