"""The xdist scheduler that hands out tests in a planned order.

xdist's controller asks a scheduler which test which worker runs next. The hook
``pytest_xdist_make_scheduler`` returns this one under ``--dist load``. Tests are numbered by their
*index* in the list that all workers have collected. The plan, by ``packing.plan``, is a list of
*units*, as ``[[3, 4, 5], [0]]``. The tests 3, 4 and 5 need the same process groups, so that one
worker runs them one after the other. Tests in no unit are ordinary ones.

The module imports xdist, so that it is imported only under xdist.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from xdist.scheduler import LoadScheduling

#: A function from the collected node ids and the number of workers to the units.
Plan = Callable[[Sequence[str], int], Sequence[Sequence[int]]]
#: How many tests a worker has at a time: the one that runs, and the next one, which its teardown
#: needs to know (``--dist load --maxschedchunk 1``;
#: https://pytest-xdist.readthedocs.io/en/stable/distribution.html).
IN_HAND = 2


class PackedScheduling(LoadScheduling):  # type: ignore[misc]  # xdist is untyped here
    """Hands out the planned units, one at a time to the next free worker.

    All other tests follow, as ``--dist load`` hands them out. A session without distributed tests
    has an empty plan.

    xdist's own rule hands out slices of consecutive tests: one worker would get all large tests,
    and the checks of a suite that share process groups would go to several workers, which would
    wait for one another.

    Args:
        config: The configuration of pytest.
        log: xdist's log.
        plan: Makes the plan once all workers have collected.
    """

    # Two attributes of xdist's class. ``collection`` has the node ids of all tests, and is None
    # until all workers have collected. ``maxschedchunk`` is the most tests that a worker gets at a
    # time (``--maxschedchunk``); None for no limit.
    collection: list[str] | None
    maxschedchunk: int | None

    def __init__(self, config: pytest.Config, log: Any, plan: Plan) -> None:
        super().__init__(config, log)
        self._plan = plan
        #: Index of a test -> the number of its unit. Its keys are in the order of the plan.
        self._unit: dict[int, int] = {}

    def schedule(self) -> None:
        """Hand out the first units, now that all workers have collected.

        xdist calls it again when a worker is added later, which then gets tests.
        """
        if self.collection is not None:
            super().schedule()
            return
        collection = self._make_plan()
        if not self._unit:
            super().schedule()
            return
        # As xdist's own ``schedule`` does, but in another order. ``pending`` are the indices of all
        # tests that no worker has: first those of the plan, in its order, then the others.
        self.collection = collection
        self.pending[:] = list(self._unit)
        for index in range(len(collection)):
            if index not in self._unit:
                self.pending.append(index)
        if self.maxschedchunk is None:
            self.maxschedchunk = len(collection)
        # ``node2pending`` has each worker to the indices of the tests that it has and has not
        # finished. One unit for each worker in turn, so that the first units of the plan start
        # first.
        for _ in range(IN_HAND):
            for worker in list(self.node2pending):
                self._hand_out(worker)
        for worker in list(self.node2pending):
            self.check_schedule(worker)

    def _make_plan(self) -> list[str]:
        """Plan the units of what the workers have collected, and store them in ``_unit``.

        Returns:
            The node ids that the first worker has collected. Nothing is planned if the workers
            collected different tests.
        """
        collection: list[str]
        others: list[list[str]]
        collection, *others = self.node2collection.values()
        for other in others:
            if other != collection:
                # xdist reports that.
                return collection
        units = self._plan(collection, 1 + len(others))
        for number, unit in enumerate(units):
            for index in unit:
                self._unit[index] = number
        return collection

    def check_schedule(self, node: Any, duration: float = 0) -> None:
        """Hand that worker more tests if it has too few; xdist calls it when a test has ended."""
        while self._hand_out(node):
            pass
        # No unit is left: xdist's own rule hands out the ordinary tests.
        if not self._next_unit():
            super().check_schedule(node, duration)

    def _hand_out(self, node: Any) -> bool:
        """Hand that worker the next unit if it needs one; return whether it got one."""
        unit = self._next_unit()
        if not unit or node.shutting_down or len(self.node2pending[node]) >= IN_HAND:
            return False
        del self.pending[: len(unit)]
        self.node2pending[node].extend(unit)
        node.send_runtest_some(unit)
        return True

    def _next_unit(self) -> list[int]:
        """Return the indices of the next unit; empty if an ordinary test comes next, or none."""
        unit: list[int] = []
        if not self.pending:
            return unit
        number = self._unit.get(self.pending[0])
        if number is None:
            return unit
        # The tests of a unit follow each other.
        for index in self.pending:
            if self._unit.get(index) != number:
                break
            unit.append(index)
        return unit
