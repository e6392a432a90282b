"""Ranks that never ran: what they would have logged and left."""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from pytest_distcompat.events import Action, Done, Error, Event, SnapshotTaken, Start
from pytest_distcompat.launch.forensics.conclude import RankProcess, conclude
from pytest_distcompat.launch.forensics.ending import Ending


@dataclass
class Ranks:
    """Logs what ranks log; each event comes later than all before it, on whatever rank."""

    clock: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    events: dict[int, list[Event]] = field(default_factory=lambda: defaultdict(list))
    left: dict[int, RankProcess] = field(default_factory=lambda: defaultdict(RankProcess))

    def wrote(self, rank: int, *events: Event) -> None:
        for event in events:
            time = float(next(self.clock))
            self.events[rank].append(dataclasses.replace(event, rank=rank, time=time))

    def started(self, *ranks: int, action: str = "step") -> None:
        for rank in ranks:
            self.wrote(rank, Start(1000 + rank), Action(action, 2))

    def done(self, *ranks: int) -> None:
        for rank in ranks:
            self.wrote(rank, SnapshotTaken("step", 2, {}), Done())

    def raised(self, rank: int, message: str, *, lost: bool = False) -> None:
        kind, _, _ = message.partition(":")
        self.wrote(rank, Error(kind, message, f"Traceback ...\n{message}", lost=lost))

    def printed(self, rank: int, text: str) -> None:
        self.left[rank] = dataclasses.replace(self.left[rank], output=text)

    def stacked(self, rank: int, stack: str) -> None:
        self.left[rank] = dataclasses.replace(self.left[rank], stack=stack)

    def end(
        self, *codes: int | None, ended_by_us: Collection[int] = (), ended_at: Collection[float | None] = (), **how: Any
    ) -> Ending:
        """Return the ending of ranks with these exit codes; the first ones ended at these times."""
        events = {}
        processes = {}
        for rank, (code, time) in enumerate(itertools.zip_longest(codes, ended_at)):
            events[rank] = self.events[rank]
            processes[rank] = dataclasses.replace(
                self.left[rank], code=code, ended_by_us=rank in ended_by_us, ended_at=time
            )
        return conclude(events, processes, **how)

    @staticmethod
    def statuses(ending: Ending) -> list[str]:
        return [end.status for end in ending.ranks]


@pytest.fixture
def ranks() -> Ranks:
    return Ranks()
