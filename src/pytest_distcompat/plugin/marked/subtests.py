"""Results of subtests in the phase of a test in which they ran.

A *subtest* is a part of a test with a report of its own, by pytest's fixture ``subtests``. A
*phase* is the setup, the call or the teardown of a test on one *rank*, one of the processes on
which a test with ``@pytest.mark.distcompat`` runs. A rank logs each subtest as a ``Phase`` with a
name, and then the phase itself. A phase fails if one of its subtests failed.

``marked.reports`` calls ``with_subtests`` on the rank. ``marked.merge`` calls ``unfinished_phase``
in pytest's process, for a rank that ended within a phase.

A failure may be due to a *lost peer*: another rank is gone. It is a consequence and no cause.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from pytest_distcompat.plugin.marked.phase import Phase

#: The title of the section that lists subtests that were skipped or failed as expected.
SUBTESTS = "Subtests"


def with_subtests(phase: Phase, subtests: Sequence[Phase]) -> Phase:
    """Return the phase with the results of the subtests that ran in it.

    It failed if one of them failed, whatever its own outcome is.

    Args:
        phase: The phase without them.
        subtests: Its subtests, in order.
    """
    sections = [*phase.sections, *_sections_of_subtests(subtests)]
    failures = failed_phases(subtests)
    if failures:
        failures += failed_phases([phase])
        sections += _sections_of_lost_peers(failures)
        phase = _failed_by(phase, _causes(failures))
    return dataclasses.replace(phase, sections=tuple(sections))


def failed_phases(phases: Sequence[Phase]) -> list[Phase]:
    """Return the phases, or subtests, that failed."""
    failures = []
    for phase in phases:
        if phase.outcome == "failed":
            failures.append(phase)
    return failures


def _causes(failures: Sequence[Phase]) -> Sequence[Phase]:
    """Return the failures that are causes: all that are not due to a lost peer.

    If there is no such failure, all of them are returned: something must be shown.
    """
    causes = []
    for failure in failures:
        if not failure.lost:
            causes.append(failure)
    return causes or failures


def _failed_by(phase: Phase, causes: Sequence[Phase]) -> Phase:
    """Return the phase as one that failed.

    Args:
        phase: The phase.
        causes: The subtests by which it failed; the phase itself too, if it failed by itself.
    """
    message = causes[0].message
    if causes[0].subtest:
        message = f"subtest {causes[0].subtest}: {message}"
    if len(causes) > 1:
        message += f" (first of {len(causes)} failures)"
    texts = []
    for cause in causes:
        title = _title(cause)
        texts.append(f"--- {title} ---\n{cause.text.rstrip()}")
    return dataclasses.replace(
        phase,
        outcome="failed",
        location=None,
        message=message,
        text="\n\n".join(texts),
        lost=all(cause.lost for cause in causes),
        assertion=all(cause.assertion for cause in causes),
    )


def _sections_of_subtests(subtests: Sequence[Phase]) -> list[tuple[str, str]]:
    """Return the sections of each subtest, and a list of those that were skipped or xfailed."""
    sections = []
    lines = []
    for subtest in subtests:
        for title, content in subtest.sections:
            sections.append((f"{title} {subtest.subtest}", content))
        if subtest.outcome in {"skipped", "xfailed"}:
            outcome = f"{subtest.outcome}: {subtest.message}"
            lines.append(f"{subtest.subtest} {outcome}")
    if lines:
        sections.append((SUBTESTS, "\n".join(lines)))
    return sections


def _sections_of_lost_peers(failures: Sequence[Phase]) -> list[tuple[str, str]]:
    """Return a section for each failure that is due to a lost peer and therefore no cause."""
    causes = _causes(failures)
    sections = []
    for failure in failures:
        if failure not in causes:
            sections.append((f"{_title(failure)} lost its peer", failure.text))
    return sections


def _title(phase: Phase) -> str:
    """Return what failed, for the headings of a text: ``subtest [a]`` or ``the test itself``."""
    return f"subtest {phase.subtest}" if phase.subtest else "the test itself"


def unfinished_phase(logged: Sequence[Phase]) -> Phase | None:
    """Return the phase in which a rank ended, as far as its subtests tell.

    A rank that is killed in a test logs no phase for it, but it has logged the subtests before
    that.

    Args:
        logged: All that the rank logged, whole phases and subtests in order.

    Returns:
        A phase with the results of the subtests after the last whole phase; None if there are none.
    """
    subtests: list[Phase] = []
    for phase in logged:
        if phase.subtest:
            subtests.append(phase)
        else:
            subtests.clear()
    if not subtests:
        return None
    # What the phase itself did is unknown. Only ``when`` of the first subtest is kept, which says
    # whether it is the setup, the call or the teardown.
    first = subtests[0]
    empty = dataclasses.replace(
        first, outcome="passed", message="", text="", subtest="", location=None, sections=()
    )
    return with_subtests(empty, subtests)
