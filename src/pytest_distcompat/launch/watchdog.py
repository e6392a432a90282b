"""The watchdog of a run: enforces its time limit, notices ranks that vanished, kills what must be killed, and concludes."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from pytest_distcompat import clock
from pytest_distcompat.disk import full_disk_reason
from pytest_distcompat.events import Done, Error, Event, has_ended, is_excused, of_kind, pids_of
from pytest_distcompat.launch import builds
from pytest_distcompat.launch.collectives import read_wait_state
from pytest_distcompat.launch.deaths import out_of_memory_kills
from pytest_distcompat.launch.ending import Ending, RankProcess, conclude
from pytest_distcompat.launch.files import Files, read_file
from pytest_distcompat.launch.flight_recorder import END, RECORDER_SIGNAL, record_file
from pytest_distcompat.launch.process import alive, descendants, kill
from pytest_distcompat.launch.rank_log import LogReader
from pytest_distcompat.launch.request import Request
from pytest_distcompat.launch.stacks import request_stack, stack_file, threads
from pytest_distcompat.launch.stalled_ranks import StallDetector, in_torch, may_wait_for_work

#: After how many seconds the run ends in which a rank vanished: its process is gone, with code 0 and without a last event
#: (``os._exit(0)``), which the agent does not notice.
VANISHED_AFTER = 1.0
#: How long the other ranks may live on after a rank failed, in seconds.
FAILED_AFTER = 5.0
#: How long ranks that have done their work may still be there after the time limit, in seconds.
LEAVING_AFTER = 2.0
#: How long a rank gets to write its stack, in seconds.
STACK_TIMEOUT_S = 1.0
#: How long it gets to write what torch recorded, in seconds: a rank whose GIL is held by a thread in C never does.
RECORD_TIMEOUT_S = 1.0


class Watchdog:
    """The watchdog of one run: it kills what must be killed, and remembers why.

    The launcher calls ``check`` now and then. Once the watchdog has ``acted`` no rank is left, as far as it can know.
    """

    def __init__(self, request: Request, files: Files | None = None) -> None:
        self.request = request
        self.files = files or Files(Path(request.directory), first=request.here.start)
        self.logs = LogReader(request.directory, range(request.world_size))
        self.began = self._called_at = clock.now()
        #: For how long it had been stopped, and the ranks with it.
        self._gaps = 0.0
        #: When it had killed what had to be killed.
        self.acted_at = math.inf
        #: Why the parent of all nodes ends the run; empty while it does not.
        self.stopped = ""
        #: What ``conclude`` knew of the ranks here besides their logs.
        self.processes: dict[int, RankProcess] = {}
        self.known: dict[str, Any] = {}
        self.timed_out = False
        self.ended_by_us: list[int] = []
        self.ended_since = math.inf
        self._suspect_since: float | None = None
        self._failed_since: float | None = None
        self._stall_detector = StallDetector()
        self._next_check = self.began + 0.2

    @property
    def acted(self) -> bool:
        """Tell whether it has killed what had to be killed."""
        return self.acted_at < math.inf

    def check(self) -> None:
        """Kill the ranks at the time limit, if one vanished, or if they outlive another's failure or wait for one that left."""
        now = clock.now()
        if now - self._called_at > clock.GAP_S:
            self._gaps += now - self._called_at
        self._called_at = now
        if self.acted or now < self._next_check:
            return
        ran = now - self.began - self._gaps
        self._next_check = now + 0.2
        events = self.logs.read()
        if self.stopped:
            self._end(events, timed_out=False)
            return
        if ran > self.request.timeout:
            # Ranks that have done their work get a moment to end, and the agent one to notice.
            all_done = all(of_kind(Done, logged) for logged in events.values())
            if not all_done or ran > self.request.timeout + LEAVING_AFTER:
                self._end(events, timed_out=True)
            return
        pids = pids_of(events)
        vanished = any(not has_ended(events[rank]) and not alive(pid) for rank, pid in pids.items())
        failed = any(of_kind(Error, logged) for logged in events.values())
        self._suspect_since = (self._suspect_since or now) if vanished else None
        self._failed_since = (self._failed_since or now) if failed else None
        for since, limit in ((self._suspect_since, VANISHED_AFTER), (self._failed_since, FAILED_AFTER)):
            if since is not None and now - since > limit:
                self._end(events, timed_out=False)
                return
        if any(map(is_excused, events.values())):
            running = {
                rank: pid for rank, pid in pids.items() if not (has_ended(events[rank]) or is_excused(events[rank]))
            }
            if self._stall_detector.check(running.values(), lambda: self._wait_in_torch(running)):
                self._end(events, timed_out=False)

    def conclude(
        self,
        codes: Sequence[int | None] | None,
        *,
        also_ended: Iterable[int] = (),
        ended_at: Sequence[float | None] | None = None,
        environment: Mapping[str, str] = os.environ,
        **more: Any,
    ) -> Ending:
        """Return how the run ended, from the logs and files of its ranks. Locks of builds that they left are removed.

        ``codes`` and ``ended_at`` (when each was seen gone) are in the order of the ranks that were started here, ``also_ended``
        are ranks that others than the watchdog killed, and ``more`` are further arguments of ``ending.conclude``.
        """
        events, ended, ranks = self.logs.read(), {*self.ended_by_us, *also_ended}, self.request.here
        processes = {}
        for rank, code, time in zip(
            ranks, codes or [None for _ in ranks], ended_at or [None for _ in ranks], strict=True
        ):
            left = RankProcess(code, rank in ended, time, self.files.output(rank))
            if rank in ended or code or not of_kind(Done, events[rank]):
                stack, record = stack_file(self.files.run, rank), record_file(self.files.run, rank)
                left = replace(left, stack=read_file(stack), record=read_file(record))
            reported = bool(of_kind(Done, events[rank])) or bool(of_kind(Error, events[rank]))
            if not reported:
                left = replace(left, no_space=full_disk_reason(self.files.run))
            processes[rank] = left
        killed = any(code is not None and code < 0 for code in codes or ())
        known = {"seconds": clock.now() - self.began, "timeout": self.request.timeout, "ended_since": self.ended_since}
        known |= {"timed_out": self.timed_out, "oom_kills": out_of_memory_kills() if killed else 0}
        self.processes, self.known = processes, {**known, **more}
        ending = conclude(events, processes, **self.known)
        if not ending.failed:
            return ending
        builds.remove_abandoned(ending.seconds, environment)
        stacks = [end.stack for end in ending.ranks if end.status == "stuck"]
        waited_for = any(builds.is_waiting(frames) for stack in stacks for frames in threads(stack))
        return replace(ending, builds=builds.describe_locks(environment)) if waited_for else ending

    def _end(self, events: Mapping[int, Sequence[Event]], *, timed_out: bool) -> None:
        self.timed_out = timed_out
        pids = {rank: pid for rank, pid in pids_of(events).items() if alive(pid)}
        # A rank that raised before is about to end by itself. What a rank raises from here on is our doing.
        raised = {rank for rank in pids if of_kind(Error, events[rank])}
        self.ended_by_us = [rank for rank in pids if not (timed_out and rank in raised)]
        if timed_out:
            self._take_stacks({rank: pids[rank] for rank in self.ended_by_us})
            self._take_records(pids)
        self.ended_since = clock.now()
        kill(_with_children(pids.values()))
        self.acted_at = clock.now()

    def _take_stacks(self, pids: Mapping[int, int]) -> list[str]:
        """Have these ranks write their stacks, and return what they wrote."""
        files = [stack_file(self.files.run, rank) for rank in pids]
        for path, pid in zip(files, pids.values(), strict=True):
            if path.exists():
                os.truncate(path, 0)
            request_stack(pid)
        # A signal handler writes them. A rank in an uninterruptible call never does, so the wait is short.
        clock.wait_until(
            lambda: all(path.exists() and path.stat().st_size > 0 for path in files), STACK_TIMEOUT_S, every=0.02
        )
        clock.sleep(0.05)
        return list(map(read_file, files))

    def _wait_in_torch(self, pids: Mapping[int, int]) -> bool:
        """Tell whether these ranks, which sleep, all wait for other ranks."""
        stacks = dict(zip(pids, self._take_stacks(pids), strict=True))
        # A line of the user's may call C++ code that waits, which leaves nothing in the Python stack.
        rest = {rank: pids[rank] for rank, stack in stacks.items() if not in_torch(stack)}
        if not all(may_wait_for_work(pid, stacks[rank]) for rank, pid in rest.items()):
            return False
        self._take_records(rest)
        found = (read_wait_state(read_file(record_file(self.files.run, rank)), stacks[rank]) for rank in rest)
        return all(one is not None and one.unfinished is not None for one in found)

    def _take_records(self, pids: Mapping[int, int]) -> None:
        """Have these ranks write what torch recorded of collectives, after the stacks: the signal may kill a rank."""
        files = {rank: record_file(self.files.run, rank) for rank in pids}
        # Without the file a rank has no handler, and the signal would kill it.
        signalled = {rank: path for rank, path in files.items() if path.exists()}
        for rank, path in signalled.items():
            os.truncate(path, 0)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pids[rank], RECORDER_SIGNAL)
        clock.wait_until(
            lambda: all(path.read_bytes().endswith(END) for path in signalled.values()), RECORD_TIMEOUT_S, every=0.02
        )


def _with_children(pids: Iterable[int]) -> list[psutil.Process]:
    """Return the processes and their descendants, found before any is killed: a dead parent has no children."""
    found: list[psutil.Process] = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [*descendants(pid), psutil.Process(pid)]
    return found
