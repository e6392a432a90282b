"""Stacks of the ranks that another rank gave up waiting for: a collective may have a shorter time limit than its test."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

from pytest_distcompat.events import Error, Event, has_ended, of_kind, pids_of
from pytest_distcompat.launch.process import request_stack

#: Messages of gloo, the store, ``monitored_barrier`` and NCCL's watchdog when they give up waiting.
_GAVE_UP = re.compile(
    r"Timed out waiting \d+ms|wait timeout after|failed to pass monitoredBarrier|Watchdog caught collective operation timeout"
)


def request_straggler_stacks(events: Mapping[int, Sequence[Event]]) -> None:
    """Have the ranks that still run write their stacks, if this rank was the first to give up waiting for them.

    The agent ends them as soon as it sees that this rank is gone, and afterwards their stacks cannot be had.
    """
    errors = [error for logged in events.values() for error in of_kind(Error, logged)]
    gave_up = [error for error in errors if _GAVE_UP.search(error.message)]
    first = min(gave_up, key=lambda error: error.time, default=None)
    pids = pids_of(events)
    if first is None or pids.get(first.rank) != os.getpid():
        return
    for rank, pid in pids.items():
        if not has_ended(events[rank]):
            request_stack(pid)
