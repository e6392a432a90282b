"""Pool of the GPUs of pytest's own node where a scheduler counts them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from pytest_distcompat.ext.cluster.executors import Given
from pytest_distcompat.lease import Lease, Pool, gpus


@dataclass(eq=False, kw_only=True)
class ScheduledPool(Pool):
    """Pool that first gets GPUs from a scheduler, and then leases those.

    ``ask(ranks, who)`` holds the scheduler's GPUs for so many ranks.
    """

    ask: Callable[[int, str], contextlib.AbstractContextManager[Given]]

    def __post_init__(self) -> None:
        super().__post_init__()
        self._whole = self.inventory

    @contextlib.contextmanager
    def lease(self, ranks: int, *, who: str, **options: Any) -> Iterator[Lease]:
        """Lease GPUs as ``Pool`` does.

        A lease inside another one gets its GPUs, and asks for none.
        """
        with contextlib.ExitStack() as held:
            if self.inventory is self._whole:
                given = contextlib.ExitStack()
                # Without an exception of the block, whose processes have ended all the same.
                held.callback(given.close)
                ids = given.enter_context(self.ask(ranks, who))[""]
                held.callback(setattr, self, "inventory", self._whole)
                self.inventory = gpus(None, self._whole.ranks_each, ids)
            yield held.enter_context(super().lease(ranks, who=who, **options))
