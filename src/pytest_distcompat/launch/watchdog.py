"""Watches over a run from outside: its time limit, ranks that vanished, and what has to be killed."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import psutil

from pytest_distcompat import clock
from pytest_distcompat.launch.collectives import standing
from pytest_distcompat.launch.files import Files
from pytest_distcompat.launch.flight_recorder import END, RECORDER_SIGNAL
from pytest_distcompat.launch.process import alive, ask_for_stack, descendants, kill
from pytest_distcompat.launch.request import Request, has_ended, is_excused, pids_of, read_events
from pytest_distcompat.launch.standstill import Standstill, in_torch, may_wait_for_work

#: A rank whose process is gone, with code 0 and without a last word, is noticed by nobody else (``os._exit(0)``).
VANISHED_AFTER = 1.0
#: How long the others may live on after a rank failed.
FAILED_AFTER = 5.0
#: How long ranks that have done all they were told may still be there after the time limit.
LEAVING_AFTER = 2.0
#: How long a rank gets to write its stack.
STACK_TIME = 1.0
#: The same for what torch recorded: a rank whose lock of Python's is held by a thread in C never will.
RECORD_TIME = 1.0


class Watchdog:
    """One run's watch. Call ``look`` now and then; it kills what must be killed and remembers why.

    Once it has ``acted`` no rank is left, as far as it can know.
    """

    def __init__(self, request: Request, files: Files | None = None) -> None:
        self.request = request
        self.files = files or Files.of(request.directory)
        self.began = clock.now()
        self.acted = False
        self.timed_out = False
        self.ended_by_us: list[int] = []
        self.ended_since = math.inf
        self._suspect_since: float | None = None
        self._failed_since: float | None = None
        self._standstill = Standstill()
        self._next_look = self.began + 0.2

    def look(self) -> None:
        """Kill the ranks if the time is up, if one vanished, if they outlive a failure, or wait for one that will not come."""
        now = clock.now()
        if self.acted or now < self._next_look:
            return
        self._next_look = now + 0.2
        where, ranks = self.request.directory, range(self.request.world_size)
        said = [read_events(where, rank, but="snapshot") for rank in ranks]
        if now - self.began > self.request.timeout:
            # Ranks that did all they were told get a moment to leave, and the agent one to notice.
            leaving = all(any(event["event"] == "done" for event in events) for events in said)
            if not leaving or now - self.began > self.request.timeout + LEAVING_AFTER:
                self._end(said, timed_out=True)
            return
        vanished = any(not has_ended(said[rank]) and not alive(pid) for rank, pid in pids_of(said).items())
        failed = any(event["event"] == "error" for events in said for event in events)
        self._suspect_since = (self._suspect_since or now) if vanished else None
        self._failed_since = (self._failed_since or now) if failed else None
        for since, patience in ((self._suspect_since, VANISHED_AFTER), (self._failed_since, FAILED_AFTER)):
            if since is not None and now - since > patience:
                self._end(said, timed_out=False)
                return
        if any(map(is_excused, said)):
            running = {
                rank: pid
                for rank, pid in pids_of(said).items()
                if not (has_ended(said[rank]) or is_excused(said[rank]))
            }
            if self._standstill.look(running.values(), lambda: self._wait_in_torch(running)):
                self._end(said, timed_out=False)

    def _end(self, said: Sequence[Sequence[Mapping[str, Any]]], *, timed_out: bool) -> None:
        self.acted = True
        self.timed_out = timed_out
        pids = {rank: pid for rank, pid in pids_of(said).items() if alive(pid)}
        # A rank that raised before is about to leave by itself; what one raises from here on is of our asking.
        raised = {rank for rank in pids if any(event["event"] == "error" for event in said[rank])}
        self.ended_by_us = [rank for rank in pids if not (timed_out and rank in raised)]
        if timed_out:
            self._take_stacks({rank: pids[rank] for rank in self.ended_by_us})
            self._take_records(pids)
        self.ended_since = clock.now()
        kill(_with_children(pids.values()))

    def _take_stacks(self, pids: Mapping[int, int]) -> list[str]:
        """Have these ranks write their stacks; what they wrote."""
        files = [self.files.stack(rank) for rank in pids]
        for path, pid in zip(files, pids.values(), strict=True):
            if path.exists():
                os.truncate(path, 0)
            ask_for_stack(pid)
        # Written by a signal handler: give it a moment, and no more, for a rank in an uninterruptible call never will.
        clock.wait_until(
            lambda: all(path.exists() and path.stat().st_size > 0 for path in files), STACK_TIME, every=0.02
        )
        clock.sleep(0.05)
        return [path.read_text(encoding="utf-8", errors="replace") if path.exists() else "" for path in files]

    def _wait_in_torch(self, pids: Mapping[int, int]) -> bool:
        """Return whether these ranks, which sleep, all wait for other ranks."""
        stacks = dict(zip(pids, self._take_stacks(pids), strict=True))
        # A line of the user's may call what waits in C++, which leaves nothing in the stack.
        rest = {rank: pids[rank] for rank, stack in stacks.items() if not in_torch(stack)}
        if not all(may_wait_for_work(pid, stacks[rank]) for rank, pid in rest.items()):
            return False
        self._take_records(rest)
        found = (standing(self.files.record(rank), stacks[rank]) for rank in rest)
        return all(one is not None and one.unfinished is not None for one in found)

    def _take_records(self, pids: Mapping[int, int]) -> None:
        """What torch recorded of collectives, after the stacks: a rank may not survive the asking."""
        files = {rank: self.files.record(rank) for rank in pids}
        # Without the file a rank has no handler, and the signal would end it.
        asked = {rank: path for rank, path in files.items() if path.exists()}
        for rank, path in asked.items():
            os.truncate(path, 0)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pids[rank], RECORDER_SIGNAL)
        clock.wait_until(
            lambda: all(path.read_bytes().endswith(END) for path in asked.values()), RECORD_TIME, every=0.02
        )


def _with_children(pids: Iterable[int]) -> list[psutil.Process]:
    """Children first found, then killed together: a child of a dead parent could no longer be found."""
    found: list[psutil.Process] = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [*descendants(pid), psutil.Process(pid)]
    return found
