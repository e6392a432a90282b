"""Agreement on a phase of a test: one outcome from the reports of all ranks.

Under ``torchrun -m pytest`` each rank runs all tests. At the end of each phase (setup, call,
teardown) every rank sends a ``PhaseReport`` to rank 0 (``lockstep``). There ``agree`` makes one
``Outcome`` of them: for example ``Outcome("failed", "rank 1 failed: ValueError: ...")``, although
the phase passed on rank 0. It reuses the code that does the same for ranks which this package
starts: it makes the events that such ranks would have logged, and gives them to ``conclude``. Then
each rank changes its own pytest report by ``impose``.
"""

from __future__ import annotations

import dataclasses
import json
import signal
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from pytest_distcompat.events import Done, Error, Event, Excused, Start
from pytest_distcompat.launch.forensics.conclude import RankProcess, conclude
from pytest_distcompat.launch.forensics.ending import name_ranks
from pytest_distcompat.plugin.marked.merge import merge, of_all_ranks
from pytest_distcompat.plugin.marked.outcome import Outcome
from pytest_distcompat.plugin.marked.phase import STRICT_XPASS, Phase
from pytest_distcompat.plugin.reporting.representation import represent

#: The outcome of a phase that passed on all ranks. Each rank keeps its own report then.
SAME = "same"
#: The outcome of a setup that raised an xfail on some ranks and passed on others. The latter go on
#: to the call, where they may still fail; all others raise their exception there again.
POSTPONED = "postponed"
#: The problem of a rank that was still in the phase at the time limit.
STUCK = "stuck"
#: The problem of a rank that the launcher ended in the phase.
ENDED = "ended"


@dataclass(frozen=True)
class PhaseReport:
    """The report of one rank on a phase of a test: setup, call or teardown.

    Attributes:
        rank: The rank.
        location: The phase and the node id of the test: ``call of tests/test_a.py::test_sum``.
        time: When the report was made, by CLOCK_MONOTONIC, in seconds.
        phase: The outcome on the rank; None if the rank is stuck, or if the launcher ended it.
        stuck: Whether the rank was still in the phase at the time limit.
        stack: The stack of a stuck rank.
        group: Whether the rank has a process group.
        cut: Whether the rank's connections were closed so that it could finish.
        terminated: Whether the rank has received SIGTERM.
    """

    rank: int
    location: str
    time: float
    phase: Phase | None = None
    stuck: bool = False
    stack: str = ""
    group: bool = False
    cut: bool = False
    terminated: bool = False

    def to_text(self) -> str:
        """Return the report as JSON, to be sent by the launch's store."""
        phase = None if self.phase is None else self.phase.own_fields()
        return json.dumps({**vars(self), "phase": phase})

    @property
    def problem(self) -> str:
        """What kept the rank from passing; empty if it passed.

        It is the outcome (``failed``, ``skipped`` or ``xfailed``), ``stuck`` or ``ended``.
        """
        if self.phase is None:
            return STUCK if self.stuck else ENDED
        if self.phase.outcome == "passed":
            return ""
        return self.phase.outcome


def agree(reports: Mapping[int, PhaseReport], pids: Mapping[int, int], limit: float) -> Outcome:
    """Return the outcome of a phase on all ranks.

    Args:
        reports: The reports by rank. A rank that ended before it made one is missing.
        pids: The process id of each rank.
        limit: The time limit of the phase in seconds, for messages.
    """
    phases: dict[int, Phase] = {}
    for rank, report in reports.items():
        if report.phase is not None:
            phases[rank] = report.phase
    finished = len(phases) == len(pids)
    if finished and not any(report.problem for report in reports.values()):
        return _outcome_of_passed(reports, phases)
    all_skip = finished and _all_skipped(phases.values())
    # What ``conclude`` reads: by rank the events of its log, and how its process ended. A rank that
    # made no report has only the event ``Start``, and no known exit code: "ended without a report".
    events: dict[int, list[Event]] = {}
    for rank, pid in pids.items():
        events[rank] = [Start(pid, rank=rank)]
    processes = dict.fromkeys(pids, RankProcess())
    for rank, report in reports.items():
        if report.phase is None:
            processes[rank] = _unfinished_process(report)
        else:
            events[rank] += _events(report, report.phase, all_skip=all_skip)
    timed_out = any(report.stuck for report in reports.values())
    outcome = merge(conclude(events, processes, timed_out=timed_out, timeout=limit))
    any_passed_setup = any(map(_passed_setup, phases.values()))
    # Ranks on which a setup passed must still run the call if it xfailed on others. If ranks only
    # skipped, while others passed, ``merge`` has made a failure of it.
    if outcome.kind == "xfailed" and any_passed_setup:
        return dataclasses.replace(outcome, kind=POSTPONED)
    return outcome


def _unfinished_process(report: PhaseReport) -> RankProcess:
    """Return how the process of a rank ends that has not finished the phase."""
    if report.terminated:
        # As SIGTERM would have ended it at once, had this plugin no handler for it.
        return RankProcess(code=-signal.SIGTERM, stack=report.stack)
    return RankProcess(ended_by_us=True, stack=report.stack)


def _all_skipped(phases: Iterable[Phase]) -> bool:
    """Tell whether the test was skipped in each of these phases, those of all ranks."""
    return all(phase.outcome == "skipped" for phase in phases)


def _passed_setup(phase: Phase) -> bool:
    """Tell whether the phase is a setup after which the rank goes on to the call."""
    return phase.when == "setup" and phase.outcome == "passed"


def _outcome_of_passed(reports: Mapping[int, PhaseReport], phases: Mapping[int, Phase]) -> Outcome:
    """Return the outcome of a phase that passed on each rank by itself.

    It fails all the same if a rank received SIGTERM, or if a test with a strict xfail passed.
    """
    terminated = [rank for rank, report in reports.items() if report.terminated]
    if terminated:
        text = (
            f"{name_ranks(terminated)} received SIGTERM, "
            "which ends a process that has no handler of its own"
        )
        # Hard: no xfail mark and no known issue excuses that.
        return Outcome("failed", text, hard=True)
    properties_by_rank = {rank: phase.properties for rank, phase in phases.items()}
    properties = of_all_ranks(properties_by_rank)
    for phase in phases.values():
        # Such a test fails although it passed: pytest reports no exception then, but a text.
        if phase.text.startswith(STRICT_XPASS):
            return Outcome("failed", phase.text, properties=properties)
    return Outcome(SAME, "", properties=properties)


def _events(report: PhaseReport, phase: Phase, *, all_skip: bool) -> Iterator[Event]:
    """Yield the events that the log of a rank would have if this package had started the rank.

    Args:
        report: The report of the rank.
        phase: The outcome in it.
        all_skip: Whether all ranks skip the test. Then no rank left the others alone, and the phase
            simply ends.
    """
    common: dict[str, Any] = {"rank": report.rank, "time": report.time}
    yield dataclasses.replace(phase, **common)
    # None for a phase that passed; else a kind and a message, as ``("failed", "failed in setup:
    # RuntimeError: no GPU")``.
    if phase.ending is None or all_skip:
        yield Done(**common)
        return
    # ``Excused`` is for a skip or an expected failure, which the test allows.
    kind = Error if phase.outcome == "failed" else Excused
    ending, message = phase.ending
    # ``lost``: the rank failed only because another rank is gone, so it is not the cause.
    yield kind(ending, message, phase.text, lost=phase.lost, cut=report.cut, **common)


def _word_of_pytest(outcome: Outcome) -> Literal["passed", "failed", "skipped"]:
    """Return what pytest calls an outcome: an xfail is a skip with the attribute ``wasxfail``."""
    if outcome.kind in {"passed", POSTPONED}:
        return "passed"
    if outcome.kind == "failed":
        return "failed"
    return "skipped"


def impose(report: pytest.TestReport, outcome: Outcome, command: str) -> None:
    """Change a rank's own report so that it shows the outcome of all ranks.

    Args:
        report: The report of this rank's pytest.
        outcome: The outcome of the phase on all ranks.
        command: The command that repeats the test, for the message.
    """
    # ``record_property`` may have been called on another rank alone.
    own_names = {name for name, _ in report.user_properties}
    for name, value in outcome.properties:
        if name not in own_names:
            report.user_properties.append((name, value))
    if outcome.kind == SAME:
        return
    if hasattr(report, "wasxfail"):
        del report.wasxfail
    report.longrepr = None
    report.outcome = _word_of_pytest(outcome)
    if outcome.kind == "failed":
        represent(report, f"{outcome.text}\nreproduce: {command}", outcome.location)
    elif outcome.kind == "skipped":
        report.longrepr = outcome.location or ("", 0, f"Skipped: {outcome.text}")
    elif outcome.kind == "xfailed":
        report.wasxfail = f"reason: {outcome.text}"
    report.sections = list(outcome.sections)
