"""Order of tests that keeps the devices busy.

Under xdist one process, the controller, hands out tests to the workers. Before it begins,
``plugin.packing`` calls ``pack`` with the number of ranks of each test and its duration in an
earlier session, if that is known. The controller hands the tests out in the returned order.

A request for devices waits for those before it. So large process groups go first, and of each size
the longest: large groups start while many devices are free, and small, short ones fill the gaps at
the end. A test that takes most of the session goes before them all.
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
        id: The name by which the caller knows the test.
        world_size: The number of its ranks, each of which needs a device.
        seconds: How long it takes, None if unknown.
        items: How many pytest items one worker runs in a row for it. All checks of one cell of a
            suite are one demand, because they share its runs.
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

    Each has its expected duration. ``devices`` and ``workers`` are how many there are of each.
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

    For each item of a demand without one, the median of an item with the same world size is
    assumed; if there is none, that of all items; if there is none either, ``UNKNOWN`` seconds.
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
    """Return a lower bound of the session's duration (its makespan) in seconds.

    It is the largest of three: the time if all devices were always busy, the time if all workers
    were always busy, and the time of the longest test.
    """
    device_seconds: float = 0
    durations = []
    for demand in demands:
        seconds = demand.expected()
        device_seconds += min(demand.world_size, devices) * seconds
        durations.append(seconds)
    if_devices_were_busy = device_seconds / devices
    if_workers_were_busy = sum(durations) / workers
    return max([if_devices_were_busy, if_workers_were_busy, *durations])
