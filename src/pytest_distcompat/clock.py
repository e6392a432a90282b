"""The time, of whatever a test makes of Python's clocks: all deadlines, durations and orders of events are told by it."""

from __future__ import annotations

import time
from collections.abc import Callable

# Bound now, for a test may patch the module. And not ``time.monotonic``: freezegun replaces that one and its like in all modules,
# also where they are bound by other names. It leaves this function alone.
_read = time.clock_gettime
_read_ns = time.clock_gettime_ns

#: Python's own, whatever a test puts in its place.
sleep = time.sleep


def now() -> float:
    """Seconds of CLOCK_MONOTONIC, which all processes of a machine share: what ``time.monotonic`` gives on Linux."""
    return _read(time.CLOCK_MONOTONIC)


def now_ns() -> int:
    """The same in nanoseconds."""
    return _read_ns(time.CLOCK_MONOTONIC)


def wall() -> float:
    """Seconds since the epoch."""
    return _read(time.CLOCK_REALTIME)


def wait_until(holds: Callable[[], bool], seconds: float, every: float = 0.005) -> bool:
    """Wait so long at most for that to hold; whether it does."""
    deadline = now() + seconds
    while not (held := holds()) and now() < deadline:
        sleep(every)
    return held
