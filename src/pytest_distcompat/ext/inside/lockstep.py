"""Lockstep of the ranks of an external launch: after each phase all ranks report, and rank 0 decides the outcome."""

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

#: Seconds between two reads of a key that is waited for.
POLL = 0.01
#: Seconds that a rank may be late with a report: it may be busy, or dying.
REPORT_DELAY_S = 10.0
#: Seconds that a rank may go on after the launcher's SIGTERM (torchrun kills after 30 s).
TERMINATION_DELAY_S = 3.0
#: Seconds that rank 0 may take to write its reports.
REPORTING_TIMEOUT_S = 60.0
#: Outcomes of a phase that are no failure, although the rank has left the phase early.
EXCUSED = ("skipped", "xfailed")


class Gone(Exception):
    """Another rank is gone or does not answer, so that there can be no agreement."""


@dataclasses.dataclass
class Step:
    """The phase that this rank is in.

    Attributes:
        number: Counts phases; the same on all ranks.
        location: The phase and the node id of the test; the same on all ranks.
        deadline: The end of this rank's time limit, by CLOCK_MONOTONIC; ``limit`` is in seconds.
        waiting: Whether this rank was last seen waiting in torch.
    """

    number: int
    location: str
    deadline: float
    limit: float
    reported: bool = False
    cut: bool = False
    stall_detector: StallDetector = dataclasses.field(default_factory=StallDetector)
    waiting: bool = False


class Lockstep:
    """The lockstep on this rank.

    ``overrun`` is called in a thread when this rank does not finish its phase, on rank 0 with the outcome if it is known. It
    ends the process.
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
        self._own_connections = connections.of_store(self._port)
        self._lock = threading.Lock()
        self._step: Step | None = None
        self._number = 0
        #: Names of the keys that each phase sets in the store.
        self._names = (
            "problem",
            "outcome",
            "shared",
            *range(size),
            *(f"waiting/{rank}" for rank in range(size)),
        )
        self.pids: dict[int, int] = {}
        self._hosts: dict[int, str] = {}
        self._closing = threading.Event()
        self._watcher = threading.Thread(
            target=self._watch, name="distcompat-lockstep", daemon=True
        )

    # Once a session.

    def exchange(self, payload: Any, timeout: float) -> dict[int, Any]:
        """Send a payload to all ranks; return the payloads of all, by rank. Raises Gone after ``timeout`` seconds."""
        own = {"pid": os.getpid(), "host": self._host, "payload": payload}
        self._store_client.put(f"meet/{self.rank}", json.dumps(own))
        self._watcher.start()
        payloads = {}
        deadline = clock.now() + timeout
        for rank in range(self.size):
            text = self._await(f"meet/{rank}", deadline, termination_delay=TERMINATION_DELAY_S)
            if text is None:
                since = self.termination.since
                reason = (
                    "ended before it had collected its tests"
                    if since
                    else f"has collected no tests in {timeout:g} s"
                )
                raise Gone(f"rank {rank} {reason}")
            received = json.loads(text)
            self.pids[rank], self._hosts[rank] = received["pid"], received["host"]
            payloads[rank] = received["payload"]
        return payloads

    def end_session(self, status: int, reason: str) -> int:
        """Exchange exit statuses at the end of the session; return this rank's, or another rank's if this one is 0.

        ``reason`` is what this rank gives for ending its session before all tests have run; empty if it has run all.
        """
        self._closing.set()
        if reason:
            self._store_client.put(
                f"reason/{self.rank}", json.dumps({"time": clock.now(), "reason": reason})
            )
        self._store_client.put(f"left/{self.rank}", str(status))
        deadline = clock.now() + REPORT_DELAY_S
        statuses = [self._await(f"left/{rank}", deadline, of=rank) for rank in range(self.size)]
        return status or next((int(text or 1) for text in statuses if text != "0"), 0)

    def close(self) -> None:
        """Wait until rank 0 has written its reports, and ignore SIGTERM from now on. Call it last."""
        self.termination.ignore()
        if self.rank == 0:
            self._store_client.put("reported", "")
        else:
            self._await("reported", clock.now() + REPORTING_TIMEOUT_S, of=0)

    @property
    def in_phase(self) -> bool:
        """Return whether this rank is in a phase."""
        return self._step is not None

    # Phase by phase.

    def begin(self, location: str, deadline: float, limit: float) -> None:
        """Begin a phase on this rank."""
        with self._lock:
            self._number += 1
            self._step = Step(self._number, location, deadline, limit)

    def end(self, phase: Phase, *, group: bool) -> tuple[Outcome, bool, bool]:
        """End the phase on this rank, which may have a process group, and wait for the outcome of all ranks.

        Returns:
            The outcome, whether connections of any rank were cut, and whether the session cannot go on.

        Raises:
            Gone: Rank 0 does not answer.
        """
        step = self._step
        assert step is not None
        self.termination.wait(0)
        terminated = self.termination.since > 0
        report = PhaseReport(
            self.rank, step.location, clock.now(), phase, group=group, terminated=terminated
        )
        if not self._send(step, report):
            # The time limit came first: the watcher ends this process.
            threading.Event().wait()
        if self.rank == 0:
            answer = self._conclude(step)
        else:
            text = self._await(f"{step.number}/outcome", step.deadline + 2 * REPORT_DELAY_S, of=0)
            if text is None:
                raise Gone("rank 0 does not answer any more")
            answer = json.loads(text)
        self._step = None
        return decode(Outcome, answer["outcome"]), bool(answer["cut"]), bool(answer["over"])

    def from_rank_zero(self, make: Callable[[], str]) -> str:
        """Return on all ranks what ``make`` returns on rank 0. Call it at most once a phase."""
        step = self._step
        assert step is not None
        key = f"{step.number}/shared"
        if self.rank == 0:
            self._store_client.put(key, make())
        text = self._await(key, step.deadline, of=0)
        if text is None:
            raise Gone("rank 0 does not answer any more")
        return text

    def _send(self, step: Step, report: PhaseReport) -> bool:
        """Send this rank's report, unless it has sent one on that phase; return whether it was sent."""
        with self._lock:
            if step.reported:
                return False
            step.reported = True
            if report.problem:
                self._store_client.put(f"{step.number}/problem", report.problem)
            self._store_client.put(
                f"{step.number}/{self.rank}", dataclasses.replace(report, cut=step.cut).to_text()
            )
        return True

    def _conclude(self, step: Step) -> dict[str, Any]:
        """Wait for the reports of all ranks, and send them the outcome; called on rank 0."""
        reports: dict[int, PhaseReport] = {}
        while len(reports) < self.size:
            for rank in set(range(self.size)) - set(reports):
                if text := self._store_client.get(f"{step.number}/{rank}"):
                    reports[rank] = decode(PhaseReport, json.loads(text))
            missing = set(range(self.size)) - set(reports)
            late = (
                clock.now() > step.deadline + REPORT_DELAY_S
                or self.termination.since > TERMINATION_DELAY_S / 2
            )
            gone = [
                rank
                for rank in missing
                if self._is_gone(rank) or self._store_client.get(f"left/{rank}") is not None
            ]
            if late or self._store_client.lost or (gone and len(gone) == len(missing)):
                break
            clock.sleep(POLL)
        elsewhere = {
            rank: report.location
            for rank, report in reports.items()
            if report.location != step.location
        }
        reasons = {
            rank: report
            for rank in set(range(self.size)) - set(reports)
            if (report := self._left(step, rank))
        }
        outcome = agree({**reports, **reasons}, self.pids, step.limit)
        if elsewhere:
            others = "; ".join(
                f"rank {rank} is at {location}" for rank, location in elsewhere.items()
            )
            text = f"ranks do not run the same tests: rank 0 is at {step.location}; {others}"
            outcome = Outcome("failed", text, hard=True)
        over = (
            bool(elsewhere)
            or len(reports) < self.size
            or any(report.stuck or report.terminated for report in reports.values())
        )
        if not any(report.group for report in reports.values()):
            self._store_client.clear()
        answer = {
            "outcome": dataclasses.asdict(outcome),
            "over": over,
            "cut": any(report.cut for report in reports.values()),
        }
        self._store_client.put(f"{step.number}/outcome", json.dumps(answer))
        self._store_client.forget(f"{step.number - 1}/{name}" for name in self._names)
        return answer

    def _left(self, step: Step, rank: int) -> PhaseReport | None:
        """Return the report of a rank that ended its session instead of the phase, and said why; None of any other."""
        text = self._store_client.get(f"reason/{rank}")
        if text is None:
            return None
        said = json.loads(text)
        when = step.location.partition(" ")[0]
        phase = Phase(when, "failed", message=said["reason"], text=said["reason"])
        return PhaseReport(rank, step.location, said["time"], phase)

    def _await(
        self,
        key: str,
        deadline: float,
        *,
        of: int | None = None,
        termination_delay: float = REPORT_DELAY_S,
    ) -> str | None:
        """Wait for a key, and return its text; None if it does not come.

        Args:
            key: A key of the store.
            deadline: When to give up, by CLOCK_MONOTONIC.
            of: The rank that sets the key: give up if its process is gone.
            termination_delay: Give up so many seconds after the launcher's SIGTERM.
        """
        client = self._store_client
        while (text := client.get(key)) is None and clock.now() < deadline and not client.lost:
            if self.termination.since > termination_delay or (of is not None and self._is_gone(of)):
                return client.get(key)
            clock.sleep(POLL)
        return text

    def _is_gone(self, rank: int) -> bool:
        return self._hosts.get(rank) == self._host and not alive(self.pids[rank])

    # The watcher's thread.

    def _watch(self) -> None:
        while not self._closing.is_set():
            self.termination.wait(5 * POLL)
            step = self._step
            if step is None or step.reported:
                if self.termination.since > 2 * REPORT_DELAY_S:
                    self._overrun(None)
                continue
            terminated = self.termination.since > TERMINATION_DELAY_S
            problem = self._store_client.get(f"{step.number}/problem")
            if problem in EXCUSED and self._all_wait(step):
                self._cut_connections(step)
            elif problem is not None and problem not in {STUCK, *EXCUSED}:
                self._cut_connections(step, GRACE)
            # If another rank, whose limit was a little earlier, is stuck, then so is this one: it reports its stack too.
            if clock.now() > step.deadline or problem == STUCK or terminated:
                report = PhaseReport(
                    self.rank, step.location, clock.now(), stuck=not terminated, stack=_stacks()
                )
                if self._send(step, report):
                    self._give_up(step)

    def _give_up(self, step: Step) -> None:
        """Report what is known and end this process: its main thread will not return."""
        if self.rank == 0:
            self._overrun(decode(Outcome, self._conclude(step)["outcome"]))
        self._await(f"{step.number}/outcome", clock.now() + 2 * REPORT_DELAY_S, of=0)
        self._store_client.put(f"left/{self.rank}", "1")
        self.close()
        self._overrun(None)

    def _all_wait(self, step: Step) -> bool:
        """Tell whether all ranks that have not left the phase wait in torch, for ranks that have left it.

        Each rank observes itself. As long as one of them is at work, it may still end in another way.
        """
        waiting = step.stall_detector.check([os.getpid()], _waits_in_torch)
        if waiting != step.waiting:
            step.waiting = waiting
            self._store_client.put(f"{step.number}/waiting/{self.rank}", "yes" if waiting else "")
        others = set(range(self.size)) - {self.rank}
        return waiting and all(
            self._store_client.get(f"{step.number}/{rank}")
            or self._store_client.get(f"{step.number}/waiting/{rank}")
            for rank in others
        )

    def _cut_connections(self, step: Step, grace: float = 0.0) -> None:
        """Cut this rank's connections to its peers after a grace period, so that it stops waiting for them."""
        if step.cut:
            return
        clock.sleep(grace)
        with self._lock:
            if not step.reported:
                step.cut = True
                peers = {
                    pid for rank, pid in self.pids.items() if self._hosts[rank] == self._host
                } - {os.getpid()}
                connections.cut(peers, self._port, self._own_connections)


def _waits_in_torch() -> bool:
    """Tell whether the main thread of this process, which sleeps, waits for other ranks."""
    stack = _stacks()
    if in_torch(stack) or not may_wait_for_work(os.getpid(), stack):
        return in_torch(stack)
    # User code may call C++ that waits, which the Python stack does not show; the flight recorder does.
    record = b"\n".join(dump().strip() for dump in dumps()).decode("utf-8", "replace")
    operation = read_wait_state(record, stack)
    return operation is not None and operation.unfinished is not None


def _stacks() -> str:
    """Return the stacks of all threads but the current one, which faulthandler writes first."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read().partition("\n\n")[2]
