"""Expected reports of faulty tests at any world size, and how soon they come."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.faults.runs import Run

#: Instead of ranks: all of them, in any order.
ALL = ()
#: How much later than a test without a fault one with a fault may be reported, in seconds. It takes about 2 s on an idle
#: machine; the rest is for one with other work. It is below the time limits, which are 30 s and more.
SOON = 20.0
#: How much later than its time limit a hang may be reported, in seconds. Stacks and records take about 2 s on an idle machine.
#: What hangs would last ten minutes.
LATE = 60.0


@dataclass(frozen=True)
class Expected:
    """What the report of a faulty test shows."""

    #: The ranks that are shown as causes. Those below 0 are counted from the last rank.
    causes: tuple[int, ...]
    #: The first line, with a field for each cause, and ``rest`` for the other ranks.
    first: str
    #: Lines below, in this order.
    more: tuple[str, ...] = ()
    #: The number of ranks, if the run has none.
    size: int = 2
    #: Whether all other ranks are folded under the causes (True) or not shown (False); None if both are right.
    others: bool | None = True
    #: Whether the other ranks are shown as causes too, after these.
    beside: bool = False

    def expect(self, run: Run, name: str, *, in_order: bool = True) -> None:
        size = run.world_size or self.size
        causes = [rank % size for rank in self.causes] or list(range(size))
        rest = [rank for rank in range(size) if rank not in causes]
        run.shows(name, self.first.format(*causes, rest=_are(rest)), *self.more)
        shown = run.causes(name)
        if in_order and self.causes:
            assert shown[: len(causes)] == causes
        expected = causes + rest if self.beside else causes
        assert sorted(shown) == sorted(expected)
        if self.others is None:
            return
        folded = run.consequences(name)
        are_folded = self.others and not self.beside
        assert folded == (set(rest) if are_folded else set()), folded


def _are(ranks: list[int]) -> str:
    return f"rank {ranks[0]} is" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} are"


def expect_soon(run: Run, names: Mapping[str, float], limit: float) -> None:
    """Assert that these failures were reported soon, and not only at the time limit.

    Times depend on the machine and its load. So they are compared with the time of a test without a fault, on warm ranks.

    Args:
        run: The pytest that ran the tests.
        names: By test, the seconds that it takes before its fault.
        limit: Its time limit in seconds.
    """
    bare = run.seconds("test_well_after_all")
    for name, own in names.items():
        seconds, warming = run.seconds(name), run.warming(name)
        assert seconds < warming + run.waits(bare + own + SOON), (name, seconds, warming, bare)
        # The time limit begins when all is warm.
        assert seconds < warming + limit, (name, seconds, warming)


def expect_in_time(run: Run, names: Mapping[str, float]) -> None:
    """Assert that these tests, which hang, ended at their time limits: not before, and not much later."""
    for name, limit in names.items():
        seconds, warming = run.seconds(name), run.warming(name)
        assert limit <= seconds <= warming + run.waits(limit + LATE), (name, seconds, warming)
