"""An xdist scheduler that hands out tests in a planned order. Imported under xdist only, when there is something to pack."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from xdist.scheduler import LoadScheduling

from pytest_distcompat.lease.packing import IN_HAND


class PackedScheduling(LoadScheduling):  # type: ignore[misc]  # xdist is untyped here
    """Hands out what was planned one unit at a time, whoever is free first, then all else as ``--dist load`` does.

    xdist's own rule hands out runs of consecutive tests: one worker would get all that is large, and the checks of a cell
    would go to several workers, which would wait for one another's runs.
    """

    collection: list[str] | None
    maxschedchunk: int | None

    def __init__(self, config: pytest.Config, log: Any, units: Sequence[Sequence[int]]) -> None:
        super().__init__(config, log)
        self._unit = {index: number for number, unit in enumerate(units) for index in unit}

    def schedule(self) -> None:
        """Begin, or have a worker that was added later take part."""
        if self.collection is not None:
            super().schedule()
            return
        collection = next(iter(self.node2collection.values()))
        self.collection = collection
        ordinary = (index for index in range(len(collection)) if index not in self._unit)
        self.pending[:] = [*self._unit, *ordinary]
        if self.maxschedchunk is None:
            self.maxschedchunk = len(collection)
        # Dealt like cards: what is first in the list is to begin first.
        for node in [*self.nodes] * IN_HAND:
            self._hand_out(node)
        for node in self.nodes:
            self.check_schedule(node)

    def check_schedule(self, node: Any, duration: float = 0) -> None:
        """Hand that worker more if it has too little."""
        while self._hand_out(node):
            pass
        if not self._next_unit():
            super().check_schedule(node, duration)

    def _hand_out(self, node: Any) -> bool:
        """Whether there was a unit for that worker, and it needed one: a test begins when the one after it is known."""
        unit = self._next_unit()
        if not unit or node.shutting_down or len(self.node2pending[node]) >= IN_HAND:
            return False
        del self.pending[: len(unit)]
        self.node2pending[node].extend(unit)
        node.send_runtest_some(unit)
        return True

    def _next_unit(self) -> list[int]:
        """Empty if the next test is an ordinary one, or there is none."""
        first = self._unit.get(self.pending[0]) if self.pending else None
        if first is None:
            return []
        return list(itertools.takewhile(lambda index: self._unit.get(index) == first, self.pending))
