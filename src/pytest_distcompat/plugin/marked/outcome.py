"""Outcome of a test from the phases of all ranks: never better than the worst rank; disagreement is a failure."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from _pytest._code.code import ExceptionRepr

from pytest_distcompat.events import of_kind
from pytest_distcompat.excerpt import excerpt, explained
from pytest_distcompat.missing_module import hint_of
from pytest_distcompat.plugin.marked.phase import SKIPPED_ELSEWHERE, XFAILED, Phase

if TYPE_CHECKING:
    from pytest_distcompat.launch.ending import Ending

#: Captured output is cut in the middle to this many characters; all of it is in the run's directory.
SECTION_CHARACTERS = 65536

#: The text of an exception and the value of a property are cut to this many characters: pytest's process keeps them.
TEXT_CHARACTERS = 2**20

#: The first line of an exception is cut to this many characters where it becomes a headline.
HEADLINE_CHARACTERS = 500

#: The title of the section with output that a rank wrote past pytest's capture.
UNCAPTURED = "Uncaptured output"

#: The property of a failed test with the number of the rank that failed first.
RANK = "distcompat_rank"

#: The title of the section that lists subtests that were skipped or failed as expected.
SUBTESTS = "Subtests"

#: The attribute of a rank's report that failed only because another rank is gone.
LOST = "distcompat_lost_peer"

#: The attribute of a rank's report that failed by an assertion or ``pytest.fail``.
ASSERTION = "distcompat_assertion"

#: How pytest begins the text of a test that passed in spite of a strict xfail mark.
STRICT_XPASS = "[XPASS(strict)]"


def mark_exception(report: pytest.TestReport, call: pytest.CallInfo[None], root: Path) -> None:
    """Note in a rank's report what its exception is: due to a lost peer, or an assertion. Later only its text is left.

    An import that fails though the module is in ``root`` gets a hint.
    """
    from pytest_distcompat.launch.peers import lost_peer

    if call.excinfo is None:
        return
    if lost_peer(call.excinfo.value):
        setattr(report, LOST, True)
    if isinstance(call.excinfo.value, (AssertionError, pytest.fail.Exception)):
        setattr(report, ASSERTION, True)
    hint = hint_of(call.excinfo.value, root)
    if hint and isinstance(report.longrepr, ExceptionRepr):
        report.longrepr.addsection("hint", hint)


class Phases:
    """Makes the phases of an item from its reports, in order; subtests count in the phase that they ran in."""

    def __init__(self) -> None:
        self._subtests: list[Phase] = []

    def of(self, report: pytest.TestReport) -> Phase:
        """Return the phase of a report; for the report of a subtest, a phase that names it."""
        phase = phase_of(report, self._subtests)
        self._subtests = [*self._subtests, phase] if phase.subtest else []
        return phase


def phase_of(report: pytest.TestReport, subtests: Sequence[Phase] = ()) -> Phase:
    """Return the phase that a rank logs for a report.

    A strict xpass counts as passed, with its text: the parent decides by the outcomes of all ranks.
    """
    outcome: str = report.outcome
    text = report.longreprtext
    message, location = _last_line(report, text), None
    if hasattr(report, "wasxfail"):
        outcome, message = ("xfailed", str(report.wasxfail)) if report.outcome == "skipped" else ("passed", "")
    elif report.outcome == "failed" and text.startswith(STRICT_XPASS):
        outcome = "passed"
    elif report.outcome == "failed":
        crash = getattr(report.longrepr, "reprcrash", None)
        location = (str(crash.path), int(crash.lineno), message) if crash is not None else None
    elif report.outcome == "skipped" and isinstance(report.longrepr, tuple):
        path, line, reason = report.longrepr
        location, message = (str(path), int(line), str(reason)), str(reason).removeprefix("Skipped: ")
        text = f"{path}:{line}: {reason}"
    subtest = name_of(report)
    lost, assertion = (outcome == "failed" and getattr(report, name, False) for name in (LOST, ASSERTION))
    kind_of_failure: dict[str, Any] = {"lost": lost, "assertion": assertion}
    failed = not subtest and any(other.outcome == "failed" for other in subtests)
    sections = tuple(
        (title, excerpt(content, SECTION_CHARACTERS))
        for title, content in report.sections
        if report.when == "teardown" or outcome != "passed" or failed
    )
    if subtest:
        text = excerpt(text, TEXT_CHARACTERS)
        return Phase(str(report.when), outcome, message, text, location, sections, subtest=subtest, **kind_of_failure)
    properties = tuple((name, _serializable(value)) for name, value in report.user_properties)
    phase = Phase(str(report.when), outcome, message, text, location, sections, properties, **kind_of_failure)
    phase = with_subtests(phase, subtests)
    return dataclasses.replace(phase, text=excerpt(phase.text, TEXT_CHARACTERS))


def _serializable(value: Any) -> Any:
    """Return the value of a property as a built-in: for any other object its text, as JUnit's file has it.

    https://docs.pytest.org/en/stable/how-to/output.html#record-property
    """
    if not isinstance(value, (str, int, float, type(None))):
        try:
            value = str(value)
        except Exception as error:
            value = f"{type(value).__name__}, whose text cannot be made: {type(error).__name__}"
    return excerpt(value, TEXT_CHARACTERS) if isinstance(value, str) else value


def _last_line(report: pytest.TestReport, text: str) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        return explained(str(crash.message).splitlines()[0][:HEADLINE_CHARACTERS]) if crash.message else ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    # An error without a crash location (an unknown fixture) still has lines that pytest marks with E.
    marked = [line.removeprefix("E").strip() for line in lines if line.startswith("E  ")]
    return (marked[:1] or lines[-1:] or [""])[0]


class RankFailure(Exception):
    """A failure of an item on its ranks; the message is the text to show.

    Attributes:
        hard: Whether it is a crash, hang or the like, which no xfail mark excuses.
    """

    def __init__(self, text: str, *, hard: bool) -> None:
        super().__init__(text)
        self.hard = hard


class RankAssertionFailure(RankFailure, AssertionError):
    """The same if an assertion, or ``pytest.fail``, is what failed on all ranks that are a cause.

    Reporters such as Allure tell a test that failed from one that is broken by it.
    """


@dataclass(frozen=True)
class Outcome:
    """The outcome that the parent reports.

    Attributes:
        kind: ``passed``, ``failed``, ``skipped`` or ``xfailed``. A pass with a text is an unexpected one: a rank added a strict
            xfail mark to its item, and the item passed.
        hard: Whether a failure is more than an exception, so that no xfail mark excuses it.
        assertion: Whether all ranks that are a cause of a failure failed by an assertion.
    """

    kind: str
    text: str = ""
    hard: bool = False
    location: tuple[str, int, str] | None = None
    sections: tuple[tuple[str, str], ...] = ()
    properties: tuple[tuple[str, Any], ...] = ()
    assertion: bool = False

    def failure(self, text: str) -> RankFailure:
        """Return the exception for this failure."""
        kind = RankAssertionFailure if self.assertion and not self.hard else RankFailure
        return kind(text, hard=self.hard)


def merge(ending: Ending) -> Outcome:  # noqa: PLR0911 - a return for each outcome, the worst first
    """Return the outcome of a test from the logs and exits of all its ranks."""
    logged = {rank: of_kind(Phase, events) for rank, events in ending.events.items()}
    phases = {rank: [phase for phase in found if not phase.subtest] for rank, found in logged.items()}
    unfinished = {rank: phase for rank, found in logged.items() if (phase := unfinished_phase(found)) is not None}
    ending = count_subtests(ending, unfinished)
    all_phases = {rank: [*found, *([unfinished[rank]] if rank in unfinished else [])] for rank, found in phases.items()}
    details: dict[str, Any] = {"sections": _sections(all_phases, ending)}
    details["properties"] = of_all_ranks({rank: found[-1].properties for rank, found in phases.items() if found})
    strict = [phase.text for found in phases.values() for phase in found if phase.text.startswith(STRICT_XPASS)]
    # What is expected to fail and passes on all ranks is a failure, even if a teardown then fails as expected.
    unexpected = Outcome("passed", strict[0], **details) if strict and len(strict) == len(phases) else None
    if ending.failed:
        kinds = {end.kind for end in ending.ranks if end.status not in {"done", "lost peer", "stopped"}}
        expected = [end for end in (ending.cause, *ending.ranks) if end is not None and end.kind == XFAILED]
        if expected and kinds <= {XFAILED, SKIPPED_ELSEWHERE} and ending.kind == "raised":
            return unexpected or Outcome("xfailed", expected[0].message.removeprefix("raised xfailed: "), **details)
        # Ranks that skipped or xfailed come after those that failed or hung.
        excused = {XFAILED, SKIPPED_ELSEWHERE}
        ranks = (dataclasses.replace(end, status="excused") if end.kind in excused else end for end in ending.ranks)
        ending = dataclasses.replace(ending, ranks=tuple(ranks))
        if ending.cause is not None and not ending.launch_error:
            details["properties"] += ((RANK, ending.cause.rank),)
        text = re.sub(r"raised (?=failed|skipped|xfailed)", "", ending.text())
        if ending.cause is not None:
            failed = (phase.location for phase in all_phases[ending.cause.rank] if phase.outcome == "failed")
            details["location"] = next(failed, None)
        # Any rank may have ended by more than an exception, even if another rank raised first.
        crashed = ending.kind != "raised" or any(end.status == "stuck" for end in ending.ranks)
        details["assertion"] = _failed_by_assertion(ending, all_phases)
        return Outcome("failed", text, hard=crashed, **details)
    skips = {rank: phase for rank, found in phases.items() for phase in found if phase.outcome == "skipped"}
    if len(skips) == len(phases) and skips:
        first = skips[min(skips)]
        return Outcome("skipped", first.message, location=first.location, **details)
    if skips:
        outcomes = "; ".join(
            f"rank {rank} {f'skipped ({skips[rank].message})' if rank in skips else 'passed'}" for rank in phases
        )
        return Outcome("failed", f"ranks disagree: {outcomes}", **details)
    xfails = [phase for found in phases.values() for phase in found if phase.outcome == "xfailed"]
    if xfails:
        return unexpected or Outcome("xfailed", xfails[0].message, **details)
    silent = [str(rank) for rank, found in phases.items() if not any(phase.when == "teardown" for phase in found)]
    if silent:
        return Outcome(
            "failed", f"rank {', '.join(silent)} ended without running the test to its end", hard=True, **details
        )
    return Outcome("passed", strict[0] if strict else "", **details)


def _failed_by_assertion(ending: Ending, phases: Mapping[int, Sequence[Phase]]) -> bool:
    """Tell whether each rank that is a cause failed by assertions alone."""
    causes = [end.rank for end in ending.ranks if end.status not in {"done", "lost peer", "stopped", "excused"}]
    failed = [[phase for phase in phases[rank] if phase.outcome == "failed"] for rank in causes]
    return bool(failed) and all(found and all(phase.assertion for phase in found) for found in failed)


def of_all_ranks(properties: Mapping[int, Sequence[tuple[str, Any]]]) -> tuple[tuple[str, Any], ...]:
    """Return rank 0's properties, and those of other ranks that differ from them, named after their rank.

    Those of a rank's last report hold those of all reports before it.
    """
    first = tuple(properties.get(0, ()))
    others = (
        (f"{name} (rank {rank})", value)
        for rank, found in properties.items()
        for name, value in found
        if rank and (name, value) not in first
    )
    return (*first, *others)


def _sections(phases: Mapping[int, list[Phase]], ending: Ending) -> tuple[tuple[str, str], ...]:
    found = [
        (f"{title} (rank {rank})", content)
        for rank, of_rank in phases.items()
        for phase in of_rank
        for title, content in phase.sections
    ]
    # Output past pytest's capture: of C libraries, and of an interpreter that crashes.
    found += [(f"{UNCAPTURED} (rank {end.rank})", end.output) for end in ending.ranks if end.output.strip()]
    return tuple(dict.fromkeys(found))


def disagreement(warm: str, cold: str, text: str) -> str:
    """Return the failure of a test or check whose second run had another outcome."""
    return f"warm ranks and torchrun's disagree: {warm} on warm ranks, {cold} under torchrun\n\n{text}".rstrip()


def unexcused(report: pytest.TestReport) -> None:
    """Make the report a failure in spite of an xfail mark: a crash, a hang or a leak is never expected."""
    report.outcome = "failed"
    if hasattr(report, "wasxfail"):
        del report.wasxfail


# Subtests: parts of a test with reports of their own; one that fails makes its test fail. They are pytest 9's (fixture
# ``subtests``, unittest's ``subTest``) or those of the plugin pytest-subtests. In both the terminal plugin counts them, which
# ranks do not have.


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
        sections.append((SUBTESTS, "\n".join(lines)))
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
        lost, assertion = all(cause.lost for cause in causes), all(cause.assertion for cause in causes)
        changes: dict[str, Any] = {"message": first + more, "text": text, "lost": lost, "assertion": assertion}
        phase = dataclasses.replace(phase, outcome="failed", location=None, **changes)
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
