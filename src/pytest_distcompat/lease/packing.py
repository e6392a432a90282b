"""Order of tests that keeps the devices busy.

Workers take tests in the order of a list, and a request waits for those before it. So large groups
go first, and of each size the longest: large groups start while many devices are free, and small,
short ones fill the gaps at the end. A test that takes most of the session goes before them all.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

#: The assumed duration of an item if no duration is known, in seconds.
UNKNOWN = 1.0


@dataclass(frozen=True)
class Demand:
    """Devices and time that a test needs.

    Attributes:
        seconds: How long, None if unknown.
        items: How many pytest items one worker runs in a row for it: the checks of a suite's cell
            are one demand.
    """

    id: str
    world_size: int
    seconds: float | None = None
    items: int = 1

    def expected(self, otherwise: float = UNKNOWN) -> float:
        """Return its seconds, or ``otherwise`` for each item if they are unknown."""
        if self.seconds is None:
            return otherwise * self.items
        return self.seconds


def pack(demands: Iterable[Demand], devices: int, workers: int) -> list[Demand]:
    """Return the demands in the order in which workers should take them.

    Each has its expected duration.
    """
    known = expect(list(demands))
    # A test that takes most of the session must not begin last, however few devices it needs.
    long = ideal(known, devices, workers) / 2

    def priority(demand: Demand) -> tuple[bool, int, float]:
        seconds = demand.expected()
        is_long = seconds > long
        return is_long, demand.world_size, seconds

    return sorted(known, key=priority, reverse=True)


def expect(demands: Sequence[Demand]) -> list[Demand]:
    """Return the demands with durations.

    Unknown ones get the median of their world size, of all, or ``UNKNOWN`` seconds.
    """
    seconds_by_size: dict[int, list[float]] = {}
    all_seconds: list[float] = []
    for demand in demands:
        if demand.seconds is not None:
            seconds = demand.seconds / demand.items
            seconds_by_size.setdefault(demand.world_size, []).append(seconds)
            all_seconds.append(seconds)
    median_by_size = {size: statistics.median(seconds) for size, seconds in seconds_by_size.items()}
    median = statistics.median(all_seconds) if all_seconds else UNKNOWN
    expected = []
    for demand in demands:
        of_size = median_by_size.get(demand.world_size, median)
        expected.append(replace(demand, seconds=demand.expected(of_size)))
    return expected


def ideal(demands: Iterable[Demand], devices: int, workers: int) -> float:
    """Return a lower bound of the makespan in seconds.

    It is the most of: all devices always busy, all workers always busy, the longest test alone.
    """
    device_seconds: float = 0
    durations = []
    for demand in demands:
        seconds = demand.expected()
        device_seconds += min(demand.world_size, devices) * seconds
        durations.append(seconds)
    return max([device_seconds / devices, sum(durations) / workers, *durations])
