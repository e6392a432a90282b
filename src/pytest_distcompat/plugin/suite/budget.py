"""A time budget of a session: which cells come first, and which no longer start."""

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

_UNITS = {"s": 1, "m": 60, "h": 3600}


@dataclass(frozen=True)
class Budget:
    """How long cells are started, and the seed of their order."""

    seconds: float
    seed: int

    def order(self, last: Report | None) -> Callable[[str, str], tuple[bool, int, str]]:
        """Return a key by which to sort cells (driver, cell).

        Those that never ran, or were red in that report, come first.
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
            is_green = (driver, cell) in ran and (driver, cell) not in red
            # Not hash(): all xdist workers must have one order, and each has its own hash seed.
            text = f"{self.seed} {driver} {cell}"
            drawn = zlib.crc32(text.encode())
            return is_green, drawn, cell

        return position


def read_budget(text: str) -> Budget | None:
    """Return the budget that a text says; None for an empty text.

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
