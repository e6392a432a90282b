"""Detect ranks that wait in torch, as in a collective, for another rank that never comes.

A ``StallDetector`` is asked again and again by the watchdog (``watchdog``), once a rank has left
its test by a skip, and by ``ext/inside/lockstep`` on each rank. It gets the process numbers of the
ranks that are still at work. It answers True once all their main threads have slept for a second or
so, and their stacks show that they sleep in torch. ``in_torch`` and ``may_wait_for_work`` read such
a stack, a text that ``faulthandler`` wrote.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from pathlib import Path

import psutil

from pytest_distcompat import clock
from pytest_distcompat.launch.forensics.stacks import threads

#: For how many seconds a main thread must have slept without interruption, both before its stack is
#: read and after the stack showed that it is in torch.
QUIET_S = 0.6
#: After how many seconds to read stacks again if the main threads slept outside torch. The time
#: doubles with each attempt.
RECHECK_S = 1.0
#: The longest time between two attempts, in seconds.
RECHECK_AT_MOST_S = 8.0


class StallDetector:
    """Tells whether processes have stalled: their main threads sleep in torch and never wake up.

    Call ``check`` periodically. The answer takes three steps:

    1. All main threads have slept for ``QUIET_S`` seconds.
    2. Their stacks are read, which may wake them up. All show that they are in torch.
    3. All have slept for ``QUIET_S`` seconds once more.
    """

    def __init__(self) -> None:
        #: The number of context switches of each main thread when they were last counted.
        self._switches: list[object] = []
        #: Since when the main threads have slept.
        self._since = 0.0
        #: When stacks may be read again.
        self._recheck_at = 0.0
        #: For how long not to read stacks if they show no stall the next time, in seconds.
        self._pause = RECHECK_S
        #: Whether all were in torch when their stacks were last read, and have slept since.
        self._in_torch = False

    def check(self, pids: Collection[int], wait_in_torch: Callable[[], bool]) -> bool:
        """Tell whether all processes have stalled.

        Args:
            pids: The process numbers. If there are others than before, all sleep is measured anew.
            wait_in_torch: Reads the stacks, and tells whether all processes wait in torch. It is
                called only if all main threads sleep.
        """
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
            # Reading the stacks may have woken the threads up. Start to measure their sleep anew.
            self._have_run(pids)
            self._since = clock.now()
            return False
        return self._in_torch

    def _have_run(self, pids: Collection[int]) -> bool:
        """Tell whether a main thread has run since the last call.

        The kernel counts the context switches of each thread (``/proc/PID/status``). The count of a
        thread that blocks in a call does not change.
        """
        switches = [_switches(pid) for pid in pids]
        if switches == self._switches:
            return False
        self._switches = switches
        self._since = clock.now()
        return True


def _switches(pid: int) -> object:
    """Return the numbers of context switches of a process's main thread; None if it has ended.

    There are two, for voluntary and involuntary ones. They are only compared with earlier ones.
    """
    try:
        return psutil.Process(pid).num_ctx_switches()
    except psutil.Error:
        return None


def in_torch(stack: str) -> bool:
    """Tell whether the innermost Python function of the main thread is torch's.

    A function that connects to a store, the server by which ranks find each other, does not count:
    it may wait for a host that is no rank.

    Args:
        stack: The stacks of a process, as faulthandler writes them.
    """
    frames_by_thread = threads(stack)
    if not frames_by_thread:
        return False
    innermost = frames_by_thread[0][0]
    return innermost.of_torch and not innermost.of_rendezvous


def may_wait_for_work(pid: int, stack: str) -> bool:
    """Tell whether the main thread may sleep in the ``wait`` of a collective, which is C++ code.

    Such code has no Python frame. The thread sleeps in a futex, the kernel's lock, until another
    thread of the process wakes it up (https://man7.org/linux/man-pages/man5/proc_pid_wchan.5.html).
    A thread that waits for a Python lock or thread sleeps in a futex too. It is told apart in three
    ways: Python's own code is innermost, the line calls ``acquire`` rather than ``wait``, or
    another thread runs the user's code.

    Args:
        pid: The process.
        stack: Its stacks, as faulthandler writes them.
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
