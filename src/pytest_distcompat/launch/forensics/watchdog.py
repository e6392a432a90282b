"""The watchdog of a run: it enforces the time limit and notices ranks that vanished.

A run is one process group from start to end. While its ranks work, their launcher (``warm`` or
``hosting``) calls ``check`` at least ten times a second. The watchdog reads the ranks' logs, and
kills all ranks when

- the time limit has passed; each rank that hangs first writes its Python stack, and its last
  collectives from torch's flight recorder;
- a rank has vanished without a last event, as by ``os._exit(0)``;
- the others live on after a rank failed; or
- all others wait in torch for an *excused* rank, one that left its test as the test allows, by a
  skip or an expected failure.

When the ranks are gone the launcher calls ``conclude`` with their exit codes, and gets the
``Ending``: how each rank ended.
"""

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
from pytest_distcompat.launch.files import Files, read_file
from pytest_distcompat.launch.forensics.collectives import read_wait_state
from pytest_distcompat.launch.forensics.conclude import RankProcess, conclude
from pytest_distcompat.launch.forensics.deaths import out_of_memory_kills
from pytest_distcompat.launch.forensics.ending import Ending
from pytest_distcompat.launch.forensics.flight_recorder import END, RECORDER_SIGNAL, record_file
from pytest_distcompat.launch.forensics.stacks import request_stack, stack_file, threads
from pytest_distcompat.launch.forensics.stalled_ranks import (
    StallDetector,
    in_torch,
    may_wait_for_work,
)
from pytest_distcompat.launch.process import alive, descendants, kill
from pytest_distcompat.launch.rank_log import LogReader
from pytest_distcompat.launch.request import Request

#: How long to wait until the logs are read again, in seconds.
CHECK_INTERVAL_S = 0.2
#: After how many seconds the run ends in which a rank vanished: its process is gone, with code 0
#: and without a last event (``os._exit(0)``). torchrun's agent, which started it, does not notice.
VANISHED_AFTER = 1.0
#: How long the other ranks may live on after a rank failed, in seconds.
FAILED_AFTER = 5.0
#: How long ranks that have done their work may still be there after the time limit, in seconds.
LEAVING_AFTER = 2.0
#: How long a rank gets to write its stack, in seconds.
STACK_TIMEOUT_S = 1.0
#: How long it gets to write what torch recorded, in seconds: a rank whose GIL is held by a thread
#: in C never does.
RECORD_TIMEOUT_S = 1.0


class Watchdog:
    """The watchdog of one run: it kills what must be killed, and remembers why.

    The launcher calls ``check`` again and again. Once the watchdog has ``acted`` no rank is left,
    as far as it can know.

    Args:
        request: What the ranks do, with the time limit and the directory of their logs.
        files: The other files of these ranks; by default those in that directory. Ranks that do
            one request after the other keep the files of the first.
    """

    def __init__(self, request: Request, files: Files | None = None) -> None:
        self.request = request
        self.files = files or Files(Path(request.directory), first=request.here.start)
        self.logs = LogReader(request.directory, range(request.world_size))
        self.began = self._called_at = clock.now()
        #: For how many seconds this process was stopped (Ctrl-Z, a suspended machine), and the
        #: ranks with it. They do not count against the time limit.
        self._gaps = 0.0
        #: When it had killed what had to be killed; infinity before.
        self.acted_at = math.inf
        #: In a run over several machines, why pytest's machine ends the run; empty before. Another
        #: object sets it.
        self.stopped = ""
        #: What ``conclude`` knew of the ranks on this machine besides their logs: how each rank's
        #: process ended, and its further arguments (``timed_out`` and so on). Machines send it to
        #: pytest's, which concludes once more, for all ranks.
        self.processes: dict[int, RankProcess] = {}
        self.known: dict[str, Any] = {}
        #: Whether it killed ranks at the time limit.
        self.timed_out = False
        #: The ranks that it killed, and when it began to.
        self.ended_by_us: list[int] = []
        self.ended_since = math.inf
        #: Since when a rank is gone without a last event, and since when one has failed; infinity
        #: while none is, or has.
        self._vanished_since = math.inf
        self._failed_since = math.inf
        self._stall_detector = StallDetector()
        self._next_check = self.began + CHECK_INTERVAL_S

    @property
    def acted(self) -> bool:
        """Tell whether it has killed what had to be killed."""
        return self.acted_at < math.inf

    def check(self) -> None:
        """Kill the ranks if the run must end.

        The module's docstring names four reasons. A fifth is that ``stopped`` was set. Most calls
        only look at the clock: the logs are read every ``CHECK_INTERVAL_S`` seconds.
        """
        now = clock.now()
        # A gap between two calls that is so long: this process was stopped meanwhile.
        if now - self._called_at > clock.GAP_S:
            self._gaps += now - self._called_at
        self._called_at = now
        if self.acted or now < self._next_check:
            return
        self._next_check = now + CHECK_INTERVAL_S
        elapsed = now - self.began - self._gaps
        events = self.logs.read()
        if self.stopped:
            self._end(events, timed_out=False)
        elif elapsed > self.request.timeout:
            if self._must_end(events, elapsed):
                self._end(events, timed_out=True)
        elif self._outlives_failure(events, now) or self._waits_for_excused(events):
            self._end(events, timed_out=False)

    def _must_end(self, events: Mapping[int, Sequence[Event]], elapsed: float) -> bool:
        """Tell whether to end ranks after the time limit.

        Those that have done their work get a moment to leave.
        """
        if elapsed > self.request.timeout + LEAVING_AFTER:
            return True
        return any(not of_kind(Done, logged) for logged in events.values())

    def _outlives_failure(self, events: Mapping[int, Sequence[Event]], now: float) -> bool:
        """Tell whether ranks have lived on for too long after another one vanished or failed.

        A rank has vanished if its process is gone and its log has no last event.
        """
        vanished = False
        for rank, pid in pids_of(events).items():
            if not has_ended(events[rank]) and not alive(pid):
                vanished = True
        self._vanished_since = _first_time(self._vanished_since, now, seen=vanished)
        failed = any(of_kind(Error, logged) for logged in events.values())
        self._failed_since = _first_time(self._failed_since, now, seen=failed)
        return (
            now - self._vanished_since > VANISHED_AFTER or now - self._failed_since > FAILED_AFTER
        )

    def _waits_for_excused(self, events: Mapping[int, Sequence[Event]]) -> bool:
        """Tell whether all ranks at work wait in torch for an excused rank.

        An excused rank left its test as the test allows: it skipped, say. It stays alive until the
        other ranks are done. But if they are in a collective that it will never join, they must be
        ended.
        """
        excused = {rank for rank, logged in events.items() if is_excused(logged)}
        if not excused:
            return False
        running = {}
        for rank, pid in pids_of(events).items():
            if rank in excused or has_ended(events[rank]):
                continue
            running[rank] = pid
        # It calls ``_wait_in_torch`` only once all main threads have slept for a while, because to
        # read a stack may wake a rank up.
        return self._stall_detector.check(running.values(), lambda: self._wait_in_torch(running))

    def conclude(
        self,
        codes: Sequence[int | None] | None,
        *,
        also_ended: Iterable[int] = (),
        ended_at: Sequence[float | None] | None = None,
        environment: Mapping[str, str] = os.environ,
        **more: Any,
    ) -> Ending:
        """Return how the run ended, from the logs and files of its ranks.

        If the run failed, locks are removed that its ranks left when they were killed while they
        built a torch extension: later builds would wait for them.

        Args:
            codes: The exit codes, in the order of the ranks that were started on this machine; None
                or empty if they are unknown.
            also_ended: Ranks that others than the watchdog killed.
            ended_at: When each rank was seen gone, in the order of ``codes``.
            environment: The ranks' environment, which says where extensions are built.
            **more: Further arguments of ``conclude.conclude``.
        """
        events = self.logs.read()
        ranks = self.request.here
        if not codes:
            codes = [None] * len(ranks)
        if not ended_at:
            ended_at = [None] * len(ranks)
        killed_here = {*self.ended_by_us, *also_ended}
        self.processes = {}
        for rank, code, time in zip(ranks, codes, ended_at, strict=True):
            process = RankProcess(
                code=code,
                ended_by_us=rank in killed_here,
                ended_at=time,
                output=self.files.output(rank),
            )
            self.processes[rank] = self._with_reports(rank, process, events[rank])
        died_of_signal = any(code is not None and code < 0 for code in codes)
        oom_kills = 0
        if died_of_signal:
            oom_kills = out_of_memory_kills()
        self.known = {
            "seconds": clock.now() - self.began,
            "timeout": self.request.timeout,
            "ended_since": self.ended_since,
            "timed_out": self.timed_out,
            "oom_kills": oom_kills,
            **more,
        }
        ending = conclude(events, self.processes, **self.known)
        if not ending.failed:
            return ending
        builds.remove_abandoned(ending.seconds, environment)
        if _waits_for_build(ending):
            return replace(ending, builds=builds.describe_locks(environment))
        return ending

    def _with_reports(
        self, rank: int, process: RankProcess, logged: Sequence[Event]
    ) -> RankProcess:
        """Return the same process with the stacks and the record that it wrote for the report.

        A rank that ended well needs none: a file may be there all the same, from an earlier
        attempt to see whether it waits. If the rank logged no end, the disk may be full.
        """
        done = bool(of_kind(Done, logged))
        if process.ended_by_us or process.code or not done:
            stack = read_file(stack_file(self.files.run, rank))
            record = read_file(record_file(self.files.run, rank))
            process = replace(process, stack=stack, record=record)
        if not done and not of_kind(Error, logged):
            process = replace(process, no_space=full_disk_reason(self.files.run))
        return process

    def _end(self, events: Mapping[int, Sequence[Event]], *, timed_out: bool) -> None:
        """Kill the ranks that are alive; those that hang first write their stacks.

        Args:
            events: By rank, what it has logged.
            timed_out: Whether the reason is the time limit.
        """
        self.timed_out = timed_out
        living = {rank: pid for rank, pid in pids_of(events).items() if alive(pid)}
        self.ended_by_us = []
        for rank in living:
            # At the time limit, a rank that raised before is about to end by itself. What one
            # raises from here on is our doing.
            if timed_out and of_kind(Error, events[rank]):
                continue
            self.ended_by_us.append(rank)
        if timed_out:
            self._take_stacks({rank: living[rank] for rank in self.ended_by_us})
            self._take_records(living)
        self.ended_since = clock.now()
        kill(_with_children(living.values()))
        self.acted_at = clock.now()

    def _take_stacks(self, pids: Mapping[int, int]) -> dict[int, str]:
        """Have these ranks write their stacks, and return by rank what they wrote.

        Args:
            pids: By rank, its process number.
        """
        files = {rank: stack_file(self.files.run, rank) for rank in pids}
        for rank, path in files.items():
            if path.exists():
                os.truncate(path, 0)
            request_stack(pids[rank])

        def all_written() -> bool:
            for path in files.values():
                if not path.exists() or path.stat().st_size == 0:
                    return False
            return True

        # A signal handler writes them. A rank in an uninterruptible call never does, so the wait is
        # short.
        clock.wait_until(all_written, STACK_TIMEOUT_S, every=0.02)
        clock.sleep(0.05)
        return {rank: read_file(path) for rank, path in files.items()}

    def _wait_in_torch(self, pids: Mapping[int, int]) -> bool:
        """Tell whether these ranks, which sleep, all wait for other ranks.

        A rank does if torch's code is innermost in its stack. If the user's own line is innermost
        (``work.wait()``), the flight recorder must have an unfinished collective.
        """
        stacks = self._take_stacks(pids)
        # A line of the user's may call C++ code that waits, which leaves nothing in the Python
        # stack.
        elsewhere = {rank: pids[rank] for rank, stack in stacks.items() if not in_torch(stack)}
        for rank, pid in elsewhere.items():
            # Such a rank waits in the kernel, and not for a Python lock or thread.
            if not may_wait_for_work(pid, stacks[rank]):
                return False
        self._take_records(elsewhere)
        for rank in elsewhere:
            record = read_file(record_file(self.files.run, rank))
            state = read_wait_state(record, stacks[rank])
            if state is None or state.unfinished is None:
                return False
        return True

    def _take_records(self, pids: Mapping[int, int]) -> None:
        """Have these ranks write what torch's flight recorder holds: their last collectives.

        This comes after the stacks, because the signal may kill a rank (``flight_recorder``).
        """
        signalled = []
        for rank, pid in pids.items():
            path = record_file(self.files.run, rank)
            if not path.exists():
                # Without the file a rank has no handler, and the signal would kill it.
                continue
            signalled.append(path)
            os.truncate(path, 0)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, RECORDER_SIGNAL)

        def all_written() -> bool:
            return all(path.read_bytes().endswith(END) for path in signalled)

        clock.wait_until(all_written, RECORD_TIMEOUT_S, every=0.02)


def _first_time(since: float, now: float, *, seen: bool) -> float:
    """Return since when something is seen without a break; infinity if it is not seen now.

    Args:
        since: What this function returned at the check before.
        now: The time of this check.
        seen: Whether it is seen at this check.
    """
    if not seen:
        return math.inf
    return min(since, now)


def _waits_for_build(ending: Ending) -> bool:
    """Tell whether a rank that hangs waits for another process to build an extension of torch."""
    for end in ending.ranks:
        if end.status == "stuck":
            for frames in threads(end.stack):
                if builds.is_waiting(frames):
                    return True
    return False


def _with_children(pids: Iterable[int]) -> list[psutil.Process]:
    """Return the processes and their descendants.

    They must be looked up before any is killed: a dead parent has no children.
    """
    processes: list[psutil.Process] = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            processes += [*descendants(pid), psutil.Process(pid)]
    return processes
