"""Agreement on a phase: from the reports of all ranks of an external launch to one outcome, as ``marked`` judges."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pytest_distcompat.launch.ending import conclude
from pytest_distcompat.launch.request import EXCUSED
from pytest_distcompat.launch.stacks import stack_file
from pytest_distcompat.plugin.marked.outcome import STRICT_XPASS, Outcome, merge, of_all_ranks
from pytest_distcompat.plugin.marked.phase import Phase
from pytest_distcompat.plugin.reporting.representation import represent

#: The outcome of a phase that passed on all ranks, each of which then keeps its own report.
SAME = "same"
#: The problem of a rank that the time limit found in the phase, and of one that the launcher ended there.
STUCK, ENDED = "stuck", "ended"


@dataclass(frozen=True)
class PhaseReport:
    """The report of one rank on a phase. Without a phase and not stuck, the launcher ended the rank.

    Attributes:
        location: The phase and the node id of the test.
        time: When it was made, by CLOCK_MONOTONIC.
        phase: The ``Phase`` as plain data, if the rank finished it.
        stuck: Whether the time limit found the rank in the phase; ``stack`` is then its stack.
        group: Whether the rank has a process group.
        cut: Whether its connections were cut to make it finish.
    """

    rank: int
    location: str
    time: float
    phase: Mapping[str, Any] | None = None
    stuck: bool = False
    stack: str = ""
    group: bool = False
    cut: bool = False

    def to_text(self) -> str:
        """Return the report as JSON, for the store."""
        return json.dumps(dataclasses.asdict(self))

    @property
    def problem(self) -> str:
        """The outcome of a rank that did not pass, or ``stuck`` or ``ended``; empty if it passed."""
        outcome = self.phase["outcome"] if self.phase is not None else STUCK if self.stuck else ENDED
        return "" if outcome == "passed" else str(outcome)


def agree(directory: Path, reports: Mapping[int, PhaseReport], pids: Mapping[int, int], limit: float) -> Outcome:
    """Return the outcome of a phase. A rank without a report ended before it made one.

    Args:
        directory: An empty directory, for the logs that ranks started by the plugin would have written.
        reports: The reports by rank.
        pids: The process ids of all ranks.
        limit: The time limit in seconds, for messages.
    """
    phases = [report.phase for report in reports.values() if report.phase is not None]
    if len(phases) == len(pids) and not any(report.problem for report in reports.values()):
        unexpected = next((phase["text"] for phase in phases if phase["text"].startswith(STRICT_XPASS)), "")
        properties = of_all_ranks(
            {rank: Phase.from_json(report.phase).properties for rank, report in reports.items() if report.phase}
        )
        return Outcome("failed" if unexpected else SAME, unexpected, properties=properties)
    all_skip = len(phases) == len(pids) and all(phase["outcome"] == "skipped" for phase in phases)
    for rank, pid in pids.items():
        events = [{"event": "start", "rank": rank, "time": 0.0, "pid": pid}]
        report = reports.get(rank)
        if report is not None and report.phase is not None:
            events += _events(report, all_skip=all_skip)
        elif report is not None:
            stack_file(directory, rank).write_text(report.stack, encoding="utf-8")
        lines = "".join(json.dumps(event) + "\n" for event in events)
        (directory / f"rank-{rank}.jsonl").write_text(lines, encoding="utf-8")
    ended = [rank for rank, report in reports.items() if report.phase is None]
    timed_out = any(report.stuck for report in reports.values())
    return merge(conclude(directory, len(pids), None, timed_out=timed_out, ended_by_us=ended, timeout=limit))


def _events(report: PhaseReport, *, all_skip: bool) -> list[dict[str, Any]]:
    """Return the events that ``rank_session`` would have written to the rank's log."""
    assert report.phase is not None
    common = {"rank": report.rank, "time": report.time}
    phase = Phase.from_json(report.phase)
    ending = phase.ending
    last: dict[str, Any] = {"event": "done", **common}
    if ending is not None and not all_skip:
        last = {
            "event": "error" if phase.outcome == "failed" else EXCUSED,
            **common,
            "kind": ending[0],
            "message": ending[1],
            "text": phase.text,
            "lost": phase.lost,
            "cut": report.cut,
        }
    return [{"event": "phase", **common, **report.phase}, last]


def impose(report: pytest.TestReport, outcome: Outcome, command: str) -> None:
    """Change a rank's own report to show the outcome of all ranks."""
    own_names = {name for name, _ in report.user_properties}
    report.user_properties += [pair for pair in outcome.properties if pair[0] not in own_names]
    if outcome.kind == SAME:
        return
    if hasattr(report, "wasxfail"):
        del report.wasxfail
    report.outcome = "failed" if outcome.kind == "failed" else "passed" if outcome.kind == "passed" else "skipped"
    report.longrepr = None
    if outcome.kind == "failed":
        represent(report, f"{outcome.text}\nreproduce: {command}", outcome.location)
    elif outcome.kind == "skipped":
        report.longrepr = outcome.location or ("", 0, f"Skipped: {outcome.text}")
    elif outcome.kind == "xfailed":
        report.wasxfail = f"reason: {outcome.text}"
    report.sections = list(outcome.sections)
