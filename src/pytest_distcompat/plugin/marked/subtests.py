"""Subtests: parts of a test that have reports of their own, in the middle of it. One that fails makes its test fail.

They are pytest 9's (fixture ``subtests``, unittest's ``subTest``) or those of the plugin pytest-subtests. Both leave it to the
terminal to count them, which ranks do without.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pytest_distcompat.launch import Ending, RankEnd
    from pytest_distcompat.plugin.marked.phase import Phase

#: The title of what is told of subtests that were skipped or failed as expected.
TITLE = "Subtests"


def name_of(report: pytest.TestReport) -> str:
    """What a subtest is called, ``[message] (parameters)``; empty for the report of a whole phase.

    The type tells: pytest 8 has no class to ask for, and the plugin's has another name.
    """
    if type(report) is pytest.TestReport or not hasattr(report, "context"):
        return ""
    return str(report.head_line).removeprefix(report.location[2]).strip() or "(<subtest>)"


def with_subtests(phase: Phase, ran: Sequence[Phase]) -> Phase:
    """The phase in which these subtests ran: failed if one of them did, whatever became of the rest of it."""
    sections = [*phase.sections]
    sections += [(f"{title} {one.subtest}", content) for one in ran for title, content in one.sections]
    lines = [f"{one.subtest} {one.outcome}: {one.message}" for one in ran if one.outcome in {"skipped", "xfailed"}]
    if lines:
        sections.append((TITLE, "\n".join(lines)))
    failures = [one for one in ran if one.outcome == "failed"]
    if failures:
        failures += [phase] if phase.outcome == "failed" else []
        # What only lost its peer is no cause.
        told = [one for one in failures if not one.lost] or failures
        sections += [(f"{_title(one)} lost its peer", one.text) for one in failures if one not in told]
        first = f"{told[0].subtest and f'subtest {told[0].subtest}: '}{told[0].message}"
        more = f" (first of {len(told)} failures)" if len(told) > 1 else ""
        text = "\n\n".join(f"--- {_title(one)} ---\n{one.text.rstrip()}" for one in told)
        lost = all(one.lost for one in told)
        phase = dataclasses.replace(phase, outcome="failed", message=first + more, text=text, location=None, lost=lost)
    return dataclasses.replace(phase, sections=tuple(sections))


def _title(one: Phase) -> str:
    return f"subtest {one.subtest}" if one.subtest else "the test itself"


def broken_off(told: Sequence[Phase]) -> Phase | None:
    """The phase that a rank did not come to the end of, as far as subtests tell of it: what it said after its last whole one."""
    whole = [number for number, one in enumerate(told) if not one.subtest]
    ran = told[whole[-1] + 1 if whole else 0 :]
    if not ran:
        return None
    empty = dataclasses.replace(ran[0], outcome="passed", message="", text="", subtest="", location=None, sections=())
    return with_subtests(empty, ran)


def weighed(ending: Ending, phases: Mapping[int, Phase]) -> Ending:
    """The ending in which subtests that failed in such ``phases`` count: their rank may have been stopped for another's xfail."""
    failed = {rank: phase for rank, phase in phases.items() if phase.outcome == "failed"}
    ranks = tuple(_weighed(end, failed[end.rank]) if end.rank in failed else end for end in ending.ranks)
    return dataclasses.replace(ending, ranks=ranks)


def _weighed(end: RankEnd, phase: Phase) -> RankEnd:
    if end.status == "done" or (end.status in {"stopped", "lost peer"} and not phase.lost):
        message = f"raised failed: {phase.message}"
        return dataclasses.replace(end, status="raised", kind="failed", message=message, text=phase.text)
    return dataclasses.replace(end, text="\n\n".join(filter(None, (phase.text, end.text))))
