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
    """Which ranks are the causes (those below 0 are counted from the last one), the first line, more lines, who is folded."""

    causes: tuple[int, ...]
    first: str
    more: tuple[str, ...] = ()
    #: Where a run does not say it.
    size: int = 2
    #: Whether all other ranks are folded under the causes, or none is shown; None where both are right.
    others: bool | None = True
    #: Or whether they are shown as causes too, after these.
    beside: bool = False

    def expect(self, run: Run, name: str, *, in_order: bool = True) -> None:
        size = run.world_size or self.size
        causes = [rank % size for rank in self.causes] or list(range(size))
        rest = [rank for rank in range(size) if rank not in causes]
        run.shows(name, self.first.format(*causes, rest=_are(rest)), *self.more)
        found = run.causes(name)
        if in_order and self.causes:
            assert found[: len(causes)] == causes
        assert sorted(found) == sorted(causes + rest if self.beside else causes)
        folded = run.consequences(name)
        assert folded == (set(rest) if self.others and not self.beside else set()) or self.others is None, folded


def _are(ranks: list[int]) -> str:
    return f"rank {ranks[0]} is" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} are"


def expect_soon(run: Run, names: Mapping[str, float], limit: float) -> None:
    """Assert that these failures were reported soon, and not only at the time limit; each test lasts so many seconds itself.

    Times are of this machine at this moment, so they are compared with those that a test without a fault took, once all was warm.
    """
    bare = run.seconds("test_well_after_all")
    for name, own in names.items():
        seconds, warming = run.seconds(name), run.warming(name)
        assert seconds < warming + run.waits(bare + own + SOON), (name, seconds, warming, bare)
        # The time limit begins when all is warm.
        assert seconds < warming + limit, (name, seconds, warming)


def expect_in_time(run: Run, names: Mapping[str, float]) -> None:
    """These tests, which hang, ended at their time limits: not before, and not much later."""
    for name, limit in names.items():
        seconds, warming = run.seconds(name), run.warming(name)
        assert limit <= seconds <= warming + run.waits(limit + LATE), (name, seconds, warming)
