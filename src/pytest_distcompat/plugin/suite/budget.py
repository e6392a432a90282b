"""A time budget of a session: which cells come first, and which no longer start.

With ``--distcompat-budget 20m@7`` no further cell starts after 20 minutes; 7 is the seed of their
order. A *cell* is a configuration of a *driver*, the trainer under test, as ``fsdp2-fp32-w2``. The
option's parser is ``read_budget``. ``suite.order`` sorts the items by ``Budget.order``, and
``DistcompatSession.over_budget`` skips cells when the time is over. Since the order is another one
each day, all cells run once in a while.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_distcompat import clock
from pytest_distcompat.failures import UsageProblem

if TYPE_CHECKING:
    from pytest_distcompat.report.document import Report

#: The units of a time, in seconds.
_UNITS = {"s": 1, "m": 60, "h": 3600}


@dataclass(frozen=True)
class Budget:
    """A time budget of a session."""

    #: How long cells are started, in seconds since the session began.
    seconds: float
    #: The seed of their order.
    seed: int

    def order(self, last: Report | None) -> Callable[[str, str], tuple[bool, int, str]]:
        """Return the function whose values cells are sorted by; it takes a driver and a cell's id.

        Cells that never ran, or were red in the last report, come first.

        Args:
            last: The report of an earlier session; None without one.
        """
        ran = set()
        red = set()
        results = last.results if last else ()
        for result in results:
            cell = (result.driver, result.cell)
            if result.status != "skipped":
                ran.add(cell)
            if result.red:
                red.add(cell)

        def position(driver: str, cell: str) -> tuple[bool, int, str]:
            # False comes before True.
            is_green = (driver, cell) in ran and (driver, cell) not in red
            # Not hash(): all xdist workers must have one order, and each has its own hash seed.
            text = f"{self.seed} {driver} {cell}"
            drawn = zlib.crc32(text.encode())
            return is_green, drawn, cell

        return position


def read_budget(text: str) -> Budget | None:
    """Return the budget of a text such as ``90s`` or ``2h@7``; None for an empty text.

    Without a seed it is the number of the day, so that each day has another order.

    Raises:
        UsageProblem: The text is neither.
    """
    if not text:
        return None
    match = re.fullmatch(r"(\d+)([smh])(?:@(\d+))?", text)
    if match is None or not int(match[1]):
        raise UsageProblem(
            f"{text!r} is not right: expected a time and perhaps a seed, as 90s, 20m or 2h@7."
        )
    seconds = int(match[1]) * _UNITS[match[2]]
    if match[3] is None:
        today = int(clock.wall() // 86400)
        return Budget(seconds, seed=today)
    return Budget(seconds, seed=int(match[3]))
