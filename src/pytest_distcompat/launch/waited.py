"""Where the others are, when a rank gave up waiting for them: a collective may have a shorter time limit than its test."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pytest_distcompat.launch.process import ask_for_stack
from pytest_distcompat.launch.request import has_ended, pids_of

#: What gloo, the store, ``monitored_barrier`` and NCCL's watchdog say then.
_GAVE_UP = re.compile(
    r"Timed out waiting \d+ms|wait timeout after|failed to pass monitoredBarrier|Watchdog caught collective operation timeout"
)


def ask_where(said: Sequence[Sequence[Mapping[str, Any]]]) -> None:
    """Have ranks that still run write their stacks, if this rank was the first to give up waiting for them.

    The agent ends them as soon as it sees this rank gone, and nobody could tell where they were.
    """
    gave_up = [
        event for events in said for event in events if event["event"] == "error" and _GAVE_UP.search(event["message"])
    ]
    first = min(gave_up, key=lambda event: event["time"], default=None)
    pids = pids_of(said)
    if first is None or pids.get(first["rank"]) != os.getpid():
        return
    for rank, pid in pids.items():
        if not has_ended(said[rank]):
            ask_for_stack(pid)
