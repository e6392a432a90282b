"""Clocks and sleep that tests cannot patch.

A user's test may freeze time (freezegun) or replace ``time.sleep``, while this package waits for
the test's ranks in the same process. So all deadlines, durations and the order of events use this
module; no other module reads Python's clocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable

# Bound at import, since a test may patch the module. Not ``time.monotonic``: freezegun replaces it
# in all modules, under whatever name it is bound. It does not replace this function.
_read = time.clock_gettime
_read_ns = time.clock_gettime_ns

#: A loop that reads the clock many times a second, and sees a jump of so many seconds, was stopped
#: meanwhile with its process: Slurm suspends jobs, say.
GAP_S = 5.0

#: Python's own, even if a test patches ``time.sleep``.
sleep = time.sleep


def now() -> float:
    """Return the seconds of CLOCK_MONOTONIC, which all processes of a machine share.

    ``time.monotonic`` is the same on Linux.
    """
    return _read(time.CLOCK_MONOTONIC)


def now_ns() -> int:
    """Return the nanoseconds of CLOCK_MONOTONIC."""
    return _read_ns(time.CLOCK_MONOTONIC)


def wall() -> float:
    """Return the seconds since the epoch."""
    return _read(time.CLOCK_REALTIME)


def utc(seconds: float) -> str:
    """Return a time, given in seconds since the epoch, as ``2026-11-26T09:30:00Z`` (ISO 8601)."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def wait_until(holds: Callable[[], bool], seconds: float, every: float = 0.005) -> bool:
    """Wait until ``holds()`` is true, or for that many seconds; return whether it is true.

    It is called each ``every`` seconds, and at least once.
    """
    deadline = now() + seconds
    while not (is_true := holds()) and now() < deadline:
        sleep(every)
    return is_true
