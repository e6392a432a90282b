"""Ranks that never ran: the files that they would have left."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from pytest_distcompat.launch.ending import Ending, conclude

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@dataclass
class Ranks:
    """Writes what ranks write; each event comes later than all before it, on whatever rank."""

    directory: Path
    clock: Iterator[int]

    def wrote(self, rank: int, event: str, **data: Any) -> None:
        line = {"event": event, "rank": rank, "time": float(next(self.clock)), **data}
        with (self.directory / f"rank-{rank}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def started(self, *ranks: int, action: str = "step") -> None:
        for rank in ranks:
            self.wrote(rank, "start", pid=1000 + rank)
            self.wrote(rank, "action", action=action, index=2)

    def done(self, *ranks: int) -> None:
        for rank in ranks:
            self.wrote(rank, "snapshot", action="step", index=2, snapshot={})
            self.wrote(rank, "done")

    def raised(self, rank: int, message: str, *, lost: bool = False) -> None:
        text = f"Traceback ...\n{message}"
        self.wrote(rank, "error", kind=message.partition(":")[0], message=message, text=text, lost=lost)

    def printed(self, rank: int, text: str) -> None:
        path = self.directory / f"logs/none/attempt_0/{rank}/stderr.log"
        path.parent.mkdir(parents=True)
        path.write_text(text, encoding="utf-8")

    def end(self, *codes: int | None, **how: Any) -> Ending:
        return conclude(self.directory, len(codes), codes, **how)

    @staticmethod
    def statuses(ending: Ending) -> list[str]:
        return [end.status for end in ending.ranks]


@pytest.fixture
def ranks(tmp_path: Path) -> Ranks:
    return Ranks(tmp_path, itertools.count(1))
