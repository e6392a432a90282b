"""Subtests: parts of a test with reports of their own. A subtest that fails makes its test fail.

They are pytest 9's (fixture ``subtests``, unittest's ``subTest``) or those of the plugin pytest-subtests. In both the
terminal plugin counts them, which ranks do not have.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pytest_distcompat.launch import Ending
    from pytest_distcompat.plugin.marked.phase import Phase

#: The title of the section that lists subtests that were skipped or failed as expected.
TITLE = "Subtests"


def name_of(report: pytest.TestReport) -> str:
    """Return the name of a subtest, ``[message] (parameters)``; empty for the report of a whole phase.

    A report of a subtest is recognized by not being a plain TestReport: pytest 8 has no class for it, and that of the plugin
    pytest-subtests has another name than that of pytest 9.
    """
    if type(report) is pytest.TestReport or not hasattr(report, "context"):
        return ""
    return str(report.head_line).removeprefix(report.location[2]).strip() or "(<subtest>)"


def with_subtests(phase: Phase, subtests: Sequence[Phase]) -> Phase:
    """Return the phase in which these subtests ran: failed if one of them failed, whatever its own outcome is."""
    sections = [*phase.sections]
    sections += [(f"{title} {sub.subtest}", content) for sub in subtests for title, content in sub.sections]
    lines = [f"{sub.subtest} {sub.outcome}: {sub.message}" for sub in subtests if sub.outcome in {"skipped", "xfailed"}]
    if lines:
        sections.append((TITLE, "\n".join(lines)))
    failures = [sub for sub in subtests if sub.outcome == "failed"]
    if failures:
        failures += [phase] if phase.outcome == "failed" else []
        # A failure that is due to a lost peer is no cause.
        causes = [failure for failure in failures if not failure.lost] or failures
        sections += [
            (f"{_title(failure)} lost its peer", failure.text) for failure in failures if failure not in causes
        ]
        first = f"{causes[0].subtest and f'subtest {causes[0].subtest}: '}{causes[0].message}"
        more = f" (first of {len(causes)} failures)" if len(causes) > 1 else ""
        text = "\n\n".join(f"--- {_title(cause)} ---\n{cause.text.rstrip()}" for cause in causes)
        lost = all(cause.lost for cause in causes)
        phase = dataclasses.replace(phase, outcome="failed", message=first + more, text=text, location=None, lost=lost)
    return dataclasses.replace(phase, sections=tuple(sections))


def _title(phase: Phase) -> str:
    return f"subtest {phase.subtest}" if phase.subtest else "the test itself"


def unfinished_phase(logged: Sequence[Phase]) -> Phase | None:
    """Return the phase that a rank did not finish, from the subtests after its last whole phase; None if none ran."""
    whole = [index for index, phase in enumerate(logged) if not phase.subtest]
    subtests = logged[whole[-1] + 1 if whole else 0 :]
    if not subtests:
        return None
    empty = dataclasses.replace(
        subtests[0], outcome="passed", message="", text="", subtest="", location=None, sections=()
    )
    return with_subtests(empty, subtests)


def count_subtests(ending: Ending, phases: Mapping[int, Phase]) -> Ending:
    """Return the ending in which failed subtests of unfinished ``phases`` count as failures of their ranks.

    Such a rank may have been stopped because of another rank's xfail.
    """
    ranks = []
    for end in ending.ranks:
        phase = phases.get(end.rank)
        if phase is None or phase.outcome != "failed":
            ranks.append(end)
        elif end.status == "done" or (end.status in {"stopped", "lost peer"} and not phase.lost):
            message = f"raised failed: {phase.message}"
            ranks.append(dataclasses.replace(end, status="raised", kind="failed", message=message, text=phase.text))
        else:
            ranks.append(dataclasses.replace(end, text="\n\n".join(filter(None, (phase.text, end.text)))))
    return dataclasses.replace(ending, ranks=tuple(ranks))
