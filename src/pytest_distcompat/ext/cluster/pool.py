"""Pool of the GPUs of pytest's own node where a scheduler counts them.

A *pool* lends GPUs to one run at a time: ``with pool.lease(2, who="test_x") as lease``. In a
session on a Ray cluster the GPUs of pytest's own machine belong to Ray too, so a run on that
machine must first ask Ray for some, for its *ranks*, the processes of the run. ``placement`` gives
the session a ``ScheduledPool`` then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from pytest_distcompat.ext.cluster.executors import Given
from pytest_distcompat.lease import Lease, Pool, gpus


@dataclass(eq=False, kw_only=True)
class ScheduledPool(Pool):
    """Pool that first gets GPUs from a scheduler, and then leases those."""

    #: ``with ask(ranks, who) as given`` holds the scheduler's GPUs for so many ranks, with them in
    #: ``given[""]``: the name of pytest's own node is empty.
    ask: Callable[[int, str], contextlib.AbstractContextManager[Given]]

    def __post_init__(self) -> None:
        super().__post_init__()
        #: All GPUs of this machine. Inside a lease ``inventory`` has only those that were given.
        self._whole = self.inventory

    @contextlib.contextmanager
    def lease(self, ranks: int, *, who: str, **options: Any) -> Iterator[Lease]:
        """Lease GPUs as ``Pool`` does.

        A lease inside another one leases from the GPUs of the outer one: it does not ask the
        scheduler.
        """
        with contextlib.ExitStack() as lease_stack:
            if self.inventory is self._whole:
                # ``ask`` keeps the GPUs if its block raises, because ranks may still use them. Here
                # the processes of a block that raised have ended, and the scheduler must have the
                # GPUs back. So ``ask`` is entered in a stack of its own, whose ``close`` does not
                # tell it of an exception.
                scheduler_stack = contextlib.ExitStack()
                lease_stack.callback(scheduler_stack.close)
                given = scheduler_stack.enter_context(self.ask(ranks, who))
                lease_stack.callback(setattr, self, "inventory", self._whole)
                # Until the end of the lease the pool has all GPUs that were given, and no others.
                self.inventory = gpus(None, self._whole.ranks_each, given[""])
            yield lease_stack.enter_context(super().lease(ranks, who=who, **options))
