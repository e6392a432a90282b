"""What the ranks of somebody's launch say of one phase of a test becomes one outcome, by the rules for ranks of our own."""

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

#: What there is to say of a phase that passed on all ranks.
SAME = "same"
#: What is bad about a rank that the time limit found in the phase, and about one that the launcher ended there.
STUCK, ENDED = "stuck", "ended"


@dataclass(frozen=True)
class Said:
    """What one rank says of a phase: how it went, or, where the time limit found it ``stuck``, its ``stack``.

    Without both the launcher ended it.

    ``group`` is whether the rank has a process group, ``cut`` whether its connections were cut for it to come to an end.
    """

    rank: int
    place: str
    time: float
    phase: Mapping[str, Any] | None = None
    stuck: bool = False
    stack: str = ""
    group: bool = False
    cut: bool = False

    def to_text(self) -> str:
        """For the store."""
        return json.dumps(dataclasses.asdict(self))

    @property
    def bad(self) -> str:
        """``skipped``, or what is no good to wait for; empty if it passed."""
        outcome = self.phase["outcome"] if self.phase is not None else STUCK if self.stuck else ENDED
        return "" if outcome == "passed" else str(outcome)


def agree(directory: Path, said: Mapping[int, Said], pids: Mapping[int, int], limit: float) -> Outcome:
    """One outcome. Ranks of which nothing was heard ended without a report; ``pids`` are those of all ranks.

    ``directory`` is an empty one for what ranks of our own would have left.
    """
    phases = [one.phase for one in said.values() if one.phase is not None]
    if len(phases) == len(pids) and not any(one.bad for one in said.values()):
        unexpected = next((phase["text"] for phase in phases if phase["text"].startswith(STRICT_XPASS)), "")
        told = of_all_ranks({rank: Phase.from_json(one.phase).properties for rank, one in said.items() if one.phase})
        return Outcome("failed" if unexpected else SAME, unexpected, properties=told)
    all_skip = len(phases) == len(pids) and all(phase["outcome"] == "skipped" for phase in phases)
    for rank, pid in pids.items():
        events = [{"event": "start", "rank": rank, "time": 0.0, "pid": pid}]
        one = said.get(rank)
        if one is not None and one.phase is not None:
            events += _events(one, all_skip=all_skip)
        elif one is not None:
            stack_file(directory, rank).write_text(one.stack, encoding="utf-8")
        lines = "".join(json.dumps(event) + "\n" for event in events)
        (directory / f"rank-{rank}.jsonl").write_text(lines, encoding="utf-8")
    ended = [rank for rank, one in said.items() if one.phase is None]
    timed_out = any(one.stuck for one in said.values())
    return merge(conclude(directory, len(pids), None, timed_out=timed_out, ended_by_us=ended, timeout=limit))


def _events(said: Said, *, all_skip: bool) -> list[dict[str, Any]]:
    """As a rank of ours writes them (``rank_session``)."""
    assert said.phase is not None
    told = {"rank": said.rank, "time": said.time}
    phase = Phase.from_json(said.phase)
    ending = phase.ending
    last: dict[str, Any] = {"event": "done", **told}
    if ending is not None and not all_skip:
        last = {
            "event": "error" if phase.outcome == "failed" else EXCUSED,
            **told,
            "kind": ending[0],
            "message": ending[1],
            "text": phase.text,
            "lost": phase.lost,
            "cut": said.cut,
        }
    return [{"event": "phase", **told, **said.phase}, last]


def impose(report: pytest.TestReport, outcome: Outcome, command: str) -> None:
    """Make a rank's own report that of all ranks."""
    own = {name for name, _ in report.user_properties}
    report.user_properties += [pair for pair in outcome.properties if pair[0] not in own]
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
