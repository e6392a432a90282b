"""Agreement on a phase: from the reports of all ranks of an external launch to one outcome, as ``marked`` judges."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from pytest_distcompat.events import Done, Error, Event, Excused, Start
from pytest_distcompat.launch.forensics.ending import RankProcess, conclude, name_ranks
from pytest_distcompat.plugin.marked.outcome import Outcome, merge, of_all_ranks
from pytest_distcompat.plugin.marked.phase import STRICT_XPASS, Phase
from pytest_distcompat.plugin.reporting.representation import represent

#: The outcome of a phase that passed on all ranks, each of which then keeps its own report.
SAME = "same"
#: The outcome of a setup that raised as expected on some ranks only: the others may still fail in the call, so those raise there.
POSTPONED = "postponed"
#: The problem of a rank that the time limit found in the phase, and of one that the launcher ended there.
STUCK, ENDED = "stuck", "ended"


@dataclass(frozen=True)
class PhaseReport:
    """The report of one rank on a phase. Without a phase and not stuck, the launcher ended the rank.

    Attributes:
        location: The phase and the node id of the test.
        time: When it was made, by CLOCK_MONOTONIC.
        stuck: Whether the time limit found the rank in the phase; ``stack`` is then its stack.
        group: Whether the rank has a process group.
        cut: Whether its connections were cut to make it finish.
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
        """Return the report as JSON, for the store."""
        phase = None if self.phase is None else self.phase.own_fields()
        return json.dumps({**vars(self), "phase": phase})

    @property
    def problem(self) -> str:
        """The outcome of a rank that did not pass, or ``stuck`` or ``ended``; empty if it passed."""
        outcome = self.phase.outcome if self.phase is not None else STUCK if self.stuck else ENDED
        return "" if outcome == "passed" else outcome


def agree(reports: Mapping[int, PhaseReport], pids: Mapping[int, int], limit: float) -> Outcome:
    """Return the outcome of a phase. A rank without a report ended before it made one; the limit is for messages."""
    phases = {rank: report.phase for rank, report in reports.items() if report.phase is not None}
    if len(phases) == len(pids) and not any(report.problem for report in reports.values()):
        terminated = [rank for rank, report in reports.items() if report.terminated]
        if terminated:
            text = f"{name_ranks(terminated)} received SIGTERM, which ends a process that has no handler of its own"
            return Outcome("failed", text, hard=True)
        unexpected = next(
            (phase.text for phase in phases.values() if phase.text.startswith(STRICT_XPASS)), ""
        )
        properties = of_all_ranks({rank: phase.properties for rank, phase in phases.items()})
        return Outcome("failed" if unexpected else SAME, unexpected, properties=properties)
    all_skip = len(phases) == len(pids) and all(
        phase.outcome == "skipped" for phase in phases.values()
    )
    events: dict[int, list[Event]] = {rank: [Start(pid, rank=rank)] for rank, pid in pids.items()}
    processes = dict.fromkeys(pids, RankProcess())
    for rank, report in reports.items():
        if report.phase is None:
            processes[rank] = RankProcess(ended_by_us=True, stack=report.stack)
        else:
            events[rank] += _events(report, report.phase, all_skip=all_skip)
    timed_out = any(report.stuck for report in reports.values())
    outcome = merge(conclude(events, processes, timed_out=timed_out, timeout=limit))
    goes_on = any(phase.when == "setup" and phase.outcome == "passed" for phase in phases.values())
    return (
        dataclasses.replace(outcome, kind=POSTPONED)
        if outcome.kind == "xfailed" and goes_on
        else outcome
    )


def _events(report: PhaseReport, phase: Phase, *, all_skip: bool) -> Iterator[Event]:
    """Yield the events that ``rank_session`` would have written to the rank's log."""
    common: dict[str, Any] = {"rank": report.rank, "time": report.time}
    yield dataclasses.replace(phase, **common)
    if phase.ending is None or all_skip:
        yield Done(**common)
    else:
        kind = Error if phase.outcome == "failed" else Excused
        yield kind(*phase.ending, phase.text, lost=phase.lost, cut=report.cut, **common)


def impose(report: pytest.TestReport, outcome: Outcome, command: str) -> None:
    """Change a rank's own report to show the outcome of all ranks."""
    own_names = {name for name, _ in report.user_properties}
    report.user_properties += [pair for pair in outcome.properties if pair[0] not in own_names]
    if outcome.kind == SAME:
        return
    if hasattr(report, "wasxfail"):
        del report.wasxfail
    passed = outcome.kind in {"passed", POSTPONED}
    report.outcome = "passed" if passed else "failed" if outcome.kind == "failed" else "skipped"
    report.longrepr = None
    if outcome.kind == "failed":
        represent(report, f"{outcome.text}\nreproduce: {command}", outcome.location)
    elif outcome.kind == "skipped":
        report.longrepr = outcome.location or ("", 0, f"Skipped: {outcome.text}")
    elif outcome.kind == "xfailed":
        report.wasxfail = f"reason: {outcome.text}"
    report.sections = list(outcome.sections)
