"""Detection of ranks that wait in torch for a rank that will not come: their main threads sleep there, and never wake up."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from pathlib import Path

import psutil

from pytest_distcompat import clock
from pytest_distcompat.launch.forensics.stacks import threads

#: How long a main thread must have slept without waking up once, in seconds, before and after it was found to be in torch.
QUIET_S = 0.6
#: After how many seconds the stacks of ranks that slept elsewhere are read again: twice as long each time, up to the second.
RECHECK_S, RECHECK_AT_MOST_S = 1.0, 8.0


class StallDetector:
    """Tells whether processes have stalled in torch. Its owner calls ``check`` now and then."""

    def __init__(self) -> None:
        self._switches: list[object] = []
        self._since = self._recheck_at = 0.0
        self._pause = RECHECK_S
        self._in_torch = False

    def check(self, pids: Collection[int], wait_in_torch: Callable[[], bool]) -> bool:
        """Tell whether all processes wait in torch; ``wait_in_torch`` reads their stacks once they sleep, and may wake them."""
        if self._have_run(pids):
            self._in_torch = False
            return False
        now = clock.now()
        if not pids or now - self._since < QUIET_S:
            return False
        if not self._in_torch and now >= self._recheck_at:
            self._in_torch = wait_in_torch()
            if not self._in_torch:
                self._recheck_at = now + self._pause
                self._pause = min(2 * self._pause, RECHECK_AT_MOST_S)
            # From here on they must sleep for as long again.
            self._have_run(pids)
            self._since = clock.now()
            return False
        return self._in_torch

    def _have_run(self, pids: Collection[int]) -> bool:
        """Tell whether a main thread has run since the last call.

        The kernel counts the context switches of a thread (``/proc/PID/status``); a thread that blocks in a call has none.
        """
        switches = [_switches(pid) for pid in pids]
        if switches == self._switches:
            return False
        self._switches = switches
        self._since = clock.now()
        return True


def _switches(pid: int) -> object:
    """Return how often the kernel has switched to and from the main thread of a process; None if it is gone."""
    try:
        return psutil.Process(pid).num_ctx_switches()
    except psutil.Error:
        return None


def in_torch(stack: str) -> bool:
    """Tell whether the innermost Python function of the main thread is torch's, and does not connect to a store.

    A store that nobody hosts looks the same whether a rank that has left would have been its host, or nobody ever.
    """
    frames_by_thread = threads(stack)
    if not frames_by_thread:
        return False
    innermost = frames_by_thread[0][0]
    return innermost.of_torch and not innermost.of_rendezvous


def may_wait_for_work(pid: int, stack: str) -> bool:
    """Tell whether the main thread may sleep in C++ that its line calls, as in the ``wait`` of gloo's work.

    There it sleeps until another thread of its process wakes it. A thread that waits for a lock or a thread of Python's does so
    too, but then Python's own code is innermost, another thread runs the user's, or the line says ``acquire`` and not ``wait``.
    https://man7.org/linux/man-pages/man5/proc_pid_wchan.5.html
    """
    frames_by_thread = threads(stack)
    if not frames_by_thread:
        return False
    innermost = frames_by_thread[0][0]
    if innermost.of_python or not innermost.calls_wait:
        return False
    for frames in frames_by_thread[1:]:
        if any(frame.of_the_user for frame in frames):
            return False
    with contextlib.suppress(OSError):
        return "futex" in Path(f"/proc/{pid}/task/{pid}/wchan").read_text(encoding="ascii")
    return False
