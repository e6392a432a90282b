"""Stacks of the ranks that another rank gave up waiting for: a collective may have a shorter time limit than its test."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pytest_distcompat.launch.process import request_stack
from pytest_distcompat.launch.request import has_ended, pids_of

#: Messages of gloo, the store, ``monitored_barrier`` and NCCL's watchdog when they give up waiting.
_GAVE_UP = re.compile(
    r"Timed out waiting \d+ms|wait timeout after|failed to pass monitoredBarrier|Watchdog caught collective operation timeout"
)


def request_straggler_stacks(events_by_rank: Sequence[Sequence[Mapping[str, Any]]]) -> None:
    """Have the ranks that still run write their stacks, if this rank was the first to give up waiting for them.

    The agent ends them as soon as it sees that this rank is gone, and afterwards their stacks cannot be had.
    """
    gave_up = [
        event
        for events in events_by_rank
        for event in events
        if event["event"] == "error" and _GAVE_UP.search(event["message"])
    ]
    first = min(gave_up, key=lambda event: event["time"], default=None)
    pids = pids_of(events_by_rank)
    if first is None or pids.get(first["rank"]) != os.getpid():
        return
    for rank, pid in pids.items():
        if not has_ended(events_by_rank[rank]):
            request_stack(pid)
