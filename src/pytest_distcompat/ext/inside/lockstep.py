"""Lockstep of ranks that torchrun started: they agree on the outcome of each phase of a test.

Under ``torchrun -m pytest`` each rank runs all tests. ``external_launch`` has one ``Lockstep`` on
each rank. At the end of each phase (setup, call, teardown) all ranks report to rank 0, rank 0
decides, and all read its decision:

1. Each rank puts a ``PhaseReport`` under the key ``17/1`` (the 17th phase, rank 1) into the store.
   The store is torchrun's TCP server with texts by key, by which the ranks of a process group also
   find each other.
2. Rank 0 waits for all reports, calls ``agreement.agree`` and puts an ``Agreement`` under the key
   ``17/outcome``.
3. All ranks read it, and show its outcome in their own reports.

A thread on each rank watches the phase meanwhile, because the main thread may hang in a collective
that another rank never joins. If the other has left the phase with a failure, or by a skip, the
thread cuts the rank's connections, so that the collective raises. At the time limit it reports
the rank as stuck, with its Python stack, and ends the process.

torchrun sends SIGTERM to all ranks once one has failed, and kills them 30 s later. ``Termination``
catches the signal; its ``since`` says how many seconds ago it came, 0 if it has not.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import json
import os
import socket
import tempfile
import threading
from collections.abc import Callable
from typing import Any

from pytest_distcompat import clock
from pytest_distcompat.decode import decode
from pytest_distcompat.ext.inside.agreement import STUCK, PhaseReport, agree
from pytest_distcompat.ext.inside.store_client import StoreClient
from pytest_distcompat.ext.inside.termination import Termination
from pytest_distcompat.launch import connections
from pytest_distcompat.launch.forensics.collectives import read_wait_state
from pytest_distcompat.launch.forensics.flight_recorder import dumps
from pytest_distcompat.launch.forensics.stalled_ranks import (
    StallDetector,
    in_torch,
    may_wait_for_work,
)
from pytest_distcompat.launch.process import alive
from pytest_distcompat.launch.rank import GRACE
from pytest_distcompat.plugin.marked.outcome import Outcome
from pytest_distcompat.plugin.marked.phase import Phase

#: Seconds between two reads of a key for which a rank waits.
POLL = 0.01
#: Seconds by which the report of a rank may be late, because it is busy, or dying.
REPORT_DELAY_S = 10.0
#: Seconds for which a rank may go on after the launcher's SIGTERM. torchrun kills it after 30 s.
TERMINATION_DELAY_S = 3.0
#: Seconds that rank 0 may take to write its reports.
REPORTING_TIMEOUT_S = 60.0
#: Outcomes with which a rank leaves a phase early although nothing failed.
EXCUSED = ("skipped", "xfailed")


class Gone(Exception):
    """Another rank is gone or does not answer, so that the ranks cannot agree."""


@dataclasses.dataclass(frozen=True)
class Agreement:
    """What rank 0 has decided about a phase.

    Attributes:
        outcome: The outcome on all ranks: ``Outcome("failed", "rank 1 failed: ValueError: ...")``.
        over: Whether the session cannot go on, because a rank has ended or hangs, or because the
            ranks run different tests.
        cut: Whether the connections of any rank were closed.
    """

    outcome: Outcome
    over: bool
    cut: bool

    def to_text(self) -> str:
        """Return the agreement as JSON, for the store."""
        return json.dumps(dataclasses.asdict(self))


@dataclasses.dataclass
class Step:
    """The phase that this rank is in.

    Attributes:
        number: The number of the phase, from 1; the same on all ranks.
        location: The phase and the node id of the test, as ``call of tests/test_a.py::test_sum``;
            the same on all ranks.
        deadline: When this rank's time limit ends, in seconds of CLOCK_MONOTONIC.
        limit: The time limit in seconds.
        reported: Whether this rank has sent its report.
        cut: Whether this rank's connections were closed.
        stall_detector: Tells whether this rank waits in torch.
        waiting: Whether this rank was waiting in torch when it was last checked.
    """

    number: int
    location: str
    deadline: float
    limit: float
    reported: bool = False
    cut: bool = False
    stall_detector: StallDetector = dataclasses.field(default_factory=StallDetector)
    waiting: bool = False

    def key(self, name: str) -> str:
        """Return the key in the store for a text of that name in this phase."""
        return f"{self.number}/{name}"

    def report_key(self, rank: int) -> str:
        """Return the key in the store for the report of a rank."""
        return self.key(str(rank))

    def waiting_key(self, rank: int) -> str:
        """Return the key in the store for whether a rank waits in torch."""
        return self.key(f"waiting/{rank}")


def _left_key(rank: int) -> str:
    """Return the key in the store for the exit status of a rank that has left."""
    return f"left/{rank}"


class Lockstep:
    """The part of this rank in the lockstep.

    Its main thread calls ``exchange`` once, then ``begin`` and ``end`` for each phase, and at last
    ``end_session`` and ``close``.

    Args:
        rank: This rank.
        size: The number of ranks.
        termination: Tells whether the launcher has sent SIGTERM.
        overrun: Ends the process. It is called in a thread if this rank does not finish its phase;
            on rank 0 with the outcome, if that is known, so that rank 0 can report it.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        termination: Termination,
        overrun: Callable[[Outcome | None], None],
    ) -> None:
        self.rank, self.size = rank, size
        self.termination = termination
        self._overrun = overrun
        self._host = socket.gethostname()
        self._port = int(os.environ["MASTER_PORT"])
        self._store_client = StoreClient(rank, size)
        #: The file descriptors of the store client's connections, which must not be cut.
        self._own_connections = connections.of_store(self._port)
        #: Guards the step: the main thread and the watcher's change it.
        self._lock = threading.Lock()
        #: The phase that this rank is in; None between two phases.
        self._step: Step | None = None
        #: How many phases this rank has begun.
        self._number = 0
        #: The names of the keys that each phase may set in the store.
        self._names: list[object] = ["problem", "outcome", "shared", *range(size)]
        self._names += [f"waiting/{rank}" for rank in range(size)]
        #: By rank: its process number, and the name of its machine.
        self.pids: dict[int, int] = {}
        self._hosts: dict[int, str] = {}
        #: Set when the session ends: the watcher's thread ends then.
        self._closing = threading.Event()
        self._watcher = threading.Thread(
            target=self._watch, name="distcompat-lockstep", daemon=True
        )

    # Once a session.

    def exchange(self, payload: Any, timeout: float) -> dict[int, Any]:
        """Send a payload to all ranks, and return the payloads of all by rank.

        Called once, when this rank has collected its tests. From then on the watcher's thread runs.

        Args:
            payload: Plain data: the collected tests.
            timeout: For how many seconds to wait for the other ranks.

        Raises:
            Gone: If a rank sends none within ``timeout`` seconds.
        """
        own = {"pid": os.getpid(), "host": self._host, "payload": payload}
        self._store_client.put(f"meet/{self.rank}", json.dumps(own))
        self._watcher.start()
        payloads = {}
        deadline = clock.now() + timeout
        for rank in range(self.size):
            text = self._await(f"meet/{rank}", deadline, termination_delay=TERMINATION_DELAY_S)
            if text is None and self.termination.since:
                raise Gone(f"rank {rank} ended before it had collected its tests")
            if text is None:
                raise Gone(f"rank {rank} has collected no tests in {timeout:g} s")
            received = json.loads(text)
            self.pids[rank] = received["pid"]
            self._hosts[rank] = received["host"]
            payloads[rank] = received["payload"]
        return payloads

    def end_session(self, status: int, reason: str) -> int:
        """Exchange exit statuses with all ranks at the end of the session.

        Args:
            status: The exit status of this rank.
            reason: Why this rank ends its session before all tests have run; empty if all have.

        Returns:
            The status of this rank; if that is 0, the first status of any rank that is not.
        """
        self._closing.set()
        if reason:
            ending = {"time": clock.now(), "reason": reason}
            self._store_client.put(f"reason/{self.rank}", json.dumps(ending))
        self._store_client.put(_left_key(self.rank), str(status))
        deadline = clock.now() + REPORT_DELAY_S
        statuses = []
        for rank in range(self.size):
            statuses.append(self._await(_left_key(rank), deadline, of=rank))
        if status:
            return status
        for text in statuses:
            if text != "0":
                # A rank that is gone has no status.
                return int(text or 1)
        return 0

    def close(self) -> None:
        """Wait until rank 0 has written its reports; ignore SIGTERM from now on. Call this last."""
        self.termination.ignore()
        if self.rank == 0:
            self._store_client.put("reported", "")
        else:
            self._await("reported", clock.now() + REPORTING_TIMEOUT_S, of=0)

    @property
    def in_phase(self) -> bool:
        """Whether this rank is in a phase."""
        return self._step is not None

    # Phase by phase.

    def begin(self, location: str, deadline: float, limit: float) -> None:
        """Begin a phase on this rank; the arguments are fields of ``Step``."""
        with self._lock:
            self._number += 1
            self._step = Step(self._number, location, deadline, limit)

    def end(self, phase: Phase, *, group: bool) -> Agreement:
        """End the phase on this rank, and wait for the agreement of all ranks.

        Args:
            phase: The outcome on this rank.
            group: Whether this rank has a process group.

        Raises:
            Gone: If rank 0 does not answer.
        """
        step = self._step
        assert step is not None
        # Notice a signal that has just come.
        self.termination.wait(0)
        terminated = self.termination.since > 0
        report = PhaseReport(
            self.rank, step.location, clock.now(), phase, group=group, terminated=terminated
        )
        if not self._send(step, report):
            # The watcher has reported this rank as stuck already, and will end the process. Until
            # then this thread must do nothing.
            threading.Event().wait()
        if self.rank == 0:
            agreement = self._conclude(step)
        else:
            answer_deadline = step.deadline + 2 * REPORT_DELAY_S
            text = self._await(step.key("outcome"), answer_deadline, of=0)
            if text is None:
                raise Gone("rank 0 does not answer any more")
            agreement = decode(Agreement, json.loads(text))
        self._step = None
        return agreement

    def from_rank_zero(self, make: Callable[[], str]) -> str:
        """Return on all ranks what ``make`` returns on rank 0.

        All ranks must call this, and only once in a phase.
        """
        step = self._step
        assert step is not None
        key = step.key("shared")
        if self.rank == 0:
            self._store_client.put(key, make())
        text = self._await(key, step.deadline, of=0)
        if text is None:
            raise Gone("rank 0 does not answer any more")
        return text

    def _send(self, step: Step, report: PhaseReport) -> bool:
        """Send this rank's report, unless one was sent in this phase; return whether it was."""
        with self._lock:
            if step.reported:
                return False
            step.reported = True
            # What kept the rank from passing, such as ``failed`` or ``stuck``; empty if it passed.
            if report.problem:
                self._store_client.put(step.key("problem"), report.problem)
            complete = dataclasses.replace(report, cut=step.cut)
            self._store_client.put(step.report_key(self.rank), complete.to_text())
        return True

    def _conclude(self, step: Step) -> Agreement:
        """Wait for the reports of all ranks, and send the agreement to all; called on rank 0.

        Ranks that send no report in time are missing. Ranks that run another test than rank 0 make
        the phase fail: after that no agreement is possible.
        """
        reports = self._collect_reports(step)
        reports_of_left: dict[int, PhaseReport] = {}
        for rank in range(self.size):
            if rank not in reports:
                report = self._report_of_left(step, rank)
                if report is not None:
                    reports_of_left[rank] = report
        elsewhere: list[str] = []
        for rank, report in reports.items():
            if report.location != step.location:
                elsewhere.append(f"rank {rank} is at {report.location}")
        if elsewhere:
            others = "; ".join(elsewhere)
            text = f"ranks do not run the same tests: rank 0 is at {step.location}; {others}"
            outcome = Outcome("failed", text, hard=True)
        else:
            outcome = agree({**reports, **reports_of_left}, self.pids, step.limit)
        any_stopped = any(report.stuck or report.terminated for report in reports.values())
        if not any(report.group for report in reports.values()):
            # No rank has a process group, so nobody uses the keys that torch has put into the
            # store.
            self._store_client.clear()
        agreement = Agreement(
            outcome,
            over=bool(elsewhere) or len(reports) < self.size or any_stopped,
            cut=any(report.cut for report in reports.values()),
        )
        self._store_client.put(step.key("outcome"), agreement.to_text())
        # All ranks have left the phase before this one, so nobody reads its keys any more.
        previous = step.number - 1
        self._store_client.forget([f"{previous}/{name}" for name in self._names])
        return agreement

    def _collect_reports(self, step: Step) -> dict[int, PhaseReport]:
        """Return the reports by rank. Wait for a rank as long as it may still report.

        A rank will not report any more if it is much too late, if the launcher is ending all ranks,
        or if it has left.
        """
        reports: dict[int, PhaseReport] = {}
        missing = set(range(self.size))
        while missing:
            for rank in sorted(missing):
                text = self._store_client.get(step.report_key(rank))
                if text:
                    reports[rank] = decode(PhaseReport, json.loads(text))
                    missing.remove(rank)
            is_late = clock.now() > step.deadline + REPORT_DELAY_S
            is_terminated = self.termination.since > TERMINATION_DELAY_S / 2
            if is_late or is_terminated or self._store_client.lost:
                break
            if missing and all(self._has_left(rank) for rank in missing):
                break
            clock.sleep(POLL)
        return reports

    def _has_left(self, rank: int) -> bool:
        """Tell whether a rank has ended its session or its process."""
        if self._is_gone(rank):
            return True
        return self._store_client.get(_left_key(rank)) is not None

    def _report_of_left(self, step: Step, rank: int) -> PhaseReport | None:
        """Return a failed report for a rank that has ended its session with a reason, or None.

        The reason may be Ctrl-C, ``pytest.exit`` or ``--maxfail`` on that rank.
        """
        text = self._store_client.get(f"reason/{rank}")
        if text is None:
            return None
        ending = json.loads(text)
        reason = ending["reason"]
        when, _, _ = step.location.partition(" ")
        phase = Phase(when, "failed", message=reason, text=reason)
        return PhaseReport(rank, step.location, ending["time"], phase)

    def _await(
        self,
        key: str,
        deadline: float,
        *,
        of: int | None = None,
        termination_delay: float = REPORT_DELAY_S,
    ) -> str | None:
        """Wait for a key of the store, and return its text; None if nobody sets it.

        Args:
            key: The key.
            deadline: When to give up, in seconds of CLOCK_MONOTONIC.
            of: The rank that sets the key. Give up if its process is gone.
            termination_delay: Give up so many seconds after the launcher's SIGTERM.
        """
        client = self._store_client
        text = client.get(key)
        while text is None and clock.now() < deadline and not client.lost:
            is_terminated = self.termination.since > termination_delay
            if is_terminated or (of is not None and self._is_gone(of)):
                # The rank may have set the key just before it ended.
                return client.get(key)
            clock.sleep(POLL)
            text = client.get(key)
        return text

    def _is_gone(self, rank: int) -> bool:
        """Tell whether the process of a rank has ended; False for a rank on another host."""
        on_this_host = self._hosts.get(rank) == self._host
        return on_this_host and not alive(self.pids[rank])

    # The watcher's thread.

    def _watch(self) -> None:
        """Watch each phase: end it at its limit, or if other ranks have left it.

        This is the function of the watcher's thread.
        """
        while not self._closing.is_set():
            self.termination.wait(5 * POLL)
            step = self._step
            if step is None or step.reported:
                # The main thread is between two phases, or waits for rank 0. Long after SIGTERM it
                # waits in vain.
                if self.termination.since > 2 * REPORT_DELAY_S:
                    self._overrun(None)
                continue
            terminated = self.termination.since > TERMINATION_DELAY_S
            # The problem of a rank that has ended this phase, as ``failed``, ``skipped`` or
            # ``stuck``; None if no rank has one.
            problem = self._store_client.get(step.key("problem"))
            if problem in EXCUSED and self._all_wait(step):
                self._cut_connections(step)
            elif problem is not None and problem not in {STUCK, *EXCUSED}:
                # This rank may be about to fail by itself: its own failure says more.
                self._cut_connections(step, GRACE)
            # The limits of all ranks end at about the same time. If another rank has reported that
            # it is stuck, this one is stuck too, and reports its stack.
            if clock.now() > step.deadline or problem == STUCK or terminated:
                report = PhaseReport(
                    self.rank,
                    step.location,
                    clock.now(),
                    stuck=not terminated,
                    terminated=terminated,
                    stack=_stacks(),
                )
                if self._send(step, report):
                    self._give_up(step)

    def _give_up(self, step: Step) -> None:
        """Report what is known, and end this process, whose main thread will not return.

        ``_overrun`` does not return either.
        """
        if self.rank == 0:
            self._overrun(self._conclude(step).outcome)
        deadline = clock.now() + 2 * REPORT_DELAY_S
        self._await(step.key("outcome"), deadline, of=0)
        self._store_client.put(_left_key(self.rank), "1")
        self.close()
        self._overrun(None)

    def _all_wait(self, step: Step) -> bool:
        """Tell whether all ranks that are still in the phase wait in torch.

        Then they wait for ranks that have left the phase, by a skip say, and will wait for ever.
        While one of them still works, the phase may end by itself. Each rank observes itself, and
        shares in the store whether it waits.
        """
        waiting = step.stall_detector.check([os.getpid()], _waits_in_torch)
        if waiting != step.waiting:
            step.waiting = waiting
            text = "yes" if waiting else ""
            self._store_client.put(step.waiting_key(self.rank), text)
        if not waiting:
            return False
        for rank in range(self.size):
            if rank == self.rank:
                continue
            if self._store_client.get(step.report_key(rank)):
                # It has reported.
                continue
            if not self._store_client.get(step.waiting_key(rank)):
                return False
        return True

    def _cut_connections(self, step: Step, grace: float = 0.0) -> None:
        """Close this rank's connections to its peers, so that its collectives fail.

        Only ranks on the same machine count as peers: the process numbers of others are unknown to
        this machine's list of connections.

        Args:
            step: The phase.
            grace: For how many seconds the rank may still finish by itself.
        """
        if step.cut:
            return
        clock.sleep(grace)
        with self._lock:
            if step.reported:
                return
            step.cut = True
            peers: set[int] = set()
            for rank, pid in self.pids.items():
                if self._hosts[rank] == self._host and pid != os.getpid():
                    peers.add(pid)
            connections.cut(peers, self._port, self._own_connections)


def _waits_in_torch() -> bool:
    """Tell whether the main thread of this process, which sleeps, waits for other ranks.

    It does if torch's code is innermost in its stack. If the user's own line is innermost
    (``work.wait()``), the flight recorder, torch's list of the last collectives, must have an
    unfinished one.
    """
    stack = _stacks()
    if in_torch(stack):
        return True
    if not may_wait_for_work(os.getpid(), stack):
        return False
    # A line of JSON from each of torch's recorders: one for NCCL, one for other backends.
    dumped = [dump().strip() for dump in dumps()]
    record = b"\n".join(dumped).decode("utf-8", "replace")
    operation = read_wait_state(record, stack)
    return operation is not None and operation.unfinished is not None


def _stacks() -> str:
    """Return the stacks of all threads but the current one."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        # The current thread comes first, and an empty line after each thread.
        return file.read().partition("\n\n")[2]
