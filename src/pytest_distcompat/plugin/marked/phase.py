"""Phases: what one rank logs of a marked test, made from pytest's reports on that rank.

A test with ``@pytest.mark.distcompat`` runs on *ranks*, the processes of a process group. On each
of them pytest runs the item and makes a report of its setup, its call and its teardown. Ranks have
no terminal. So ``rank_reporter`` turns each report into a ``Phase`` and writes that to the rank's
log, as a line of JSON such as ``{"event": "phase", "when": "call", "outcome": "passed", ...}``.
Afterwards ``marked.outcome`` reads the phases of all ranks in pytest's process.

A rank may have *lost its peer*: it failed only because another rank is gone, as with "Connection
reset by peer". Then it is no cause of the test's failure. A *subtest* is a part of a test with a
report of its own, by pytest's fixture ``subtests``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from _pytest._code.code import ExceptionRepr

from pytest_distcompat.decode import prepare
from pytest_distcompat.events import Event
from pytest_distcompat.excerpt import encodable, excerpt, explained
from pytest_distcompat.missing_module import hint_of

#: The ``kind`` of the error that a rank logs if it skipped while other ranks did not, and if it
#: failed as its xfail mark expects. Such a rank ends before its test does, but is not the cause.
SKIPPED_ELSEWHERE, XFAILED = "skip", "xfail"

#: Output in a report: title and content of each section, as ``("Captured stdout call", "...")``.
Sections = tuple[tuple[str, str], ...]

#: The user's properties of a test (``record_property``): the name and the value of each.
Properties = tuple[tuple[str, Any], ...]

#: Captured output is cut in the middle to this many characters; all of it is in the run's
#: directory.
SECTION_CHARACTERS = 65536

#: The text of an exception and the value of a property are cut to this many characters: pytest's
#: process has all of them in memory.
TEXT_CHARACTERS = 2**20

#: The first line of an exception is cut to this many characters where it becomes a headline.
HEADLINE_CHARACTERS = 500

#: The title of the section that lists subtests that were skipped or failed as expected.
SUBTESTS = "Subtests"

#: The attribute that ``mark_exception`` sets on a rank's report if it failed only because another
#: rank is gone.
LOST = "distcompat_lost_peer"

#: The attribute that it sets if the report failed by an assertion or ``pytest.fail``.
ASSERTION = "distcompat_assertion"

#: How pytest begins the text of a test that passed in spite of a strict xfail mark.
STRICT_XPASS = "[XPASS(strict)]"


@dataclass(frozen=True)
class Phase(Event, name="phase"):
    """A phase of an item on one rank, or a subtest within one.

    Attributes:
        when: ``setup``, ``call`` or ``teardown``.
        outcome: ``passed``, ``failed``, ``skipped`` or ``xfailed``.
        message: One line: the first of the exception, or the reason of a skip or an xfail.
        text: pytest's whole text, with the traceback.
        location: The path, the line (from 1) and the message of a failure or a skip; None where
            pytest does not know them.
        sections: The captured output to show.
        properties: The properties that the test recorded up to now.
        subtest: The name of the subtest; empty for a whole phase.
        lost: Whether it failed only because another rank is gone.
        assertion: Whether it failed by an assertion or ``pytest.fail``.
    """

    when: str
    outcome: str
    message: str = ""
    text: str = ""
    location: tuple[str, int, str] | None = None
    sections: Sections = ()
    properties: Properties = ()
    subtest: str = ""
    lost: bool = False
    assertion: bool = False

    def own_fields(self) -> dict[str, Any]:
        """Return the fields as plain data, for the line in the log.

        Lone surrogates, characters that UTF-8 cannot encode, are escaped: one in a report ends a
        whole session of xdist.
        """
        # Not ``dataclasses.asdict``: it copies each text by functions that a test may patch.
        fields: dict[str, Any] = _encodable(super().own_fields())
        return fields

    @property
    def ending(self) -> tuple[str, str] | None:
        """The kind and message of the error that ends the rank after this phase.

        For example ``("failed", "failed in setup: RuntimeError: no GPU")``. None if the rank goes
        on to its next phase. A skip and an xfail end the rank only if other ranks do otherwise
        (``rank_reporter``). A subtest ends nothing: it counts when its phase is over.
        """
        if self.subtest:
            return None
        if self.outcome == "failed":
            where = "" if self.when == "call" else f" in {self.when}"
            return "failed", f"failed{where}: {self.message}"
        if self.outcome == "xfailed":
            return XFAILED, f"xfailed: {self.message}"
        if self.outcome == "skipped":
            return SKIPPED_ELSEWHERE, f"skipped ({self.message}) while other ranks went on"
        return None


def _encodable(value: Any) -> Any:
    """Return the value with its texts escaped, those in containers too."""
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, dict):
        return {key: _encodable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_encodable(item) for item in value]
        return type(value)(items)
    return value


prepare(Phase)


# From a report to a phase.


def mark_exception(report: pytest.TestReport, call: pytest.CallInfo[None], root: Path) -> None:
    """Note in a rank's report whether its exception is due to a lost peer, or an assertion.

    Later only the exception's text is left. An import that fails although the module is in the
    repository gets a hint.

    Args:
        report: pytest's report of a phase, which is changed in place.
        call: What pytest called, with the exception.
        root: pytest's root directory.
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
    """Makes the phases of an item from its reports, in order.

    pytest reports the subtests of a phase before the phase itself. They are collected until then,
    because a phase fails if one of its subtests failed.
    """

    def __init__(self) -> None:
        #: The subtests of the phase that is going on.
        self._subtests: list[Phase] = []

    def of(self, report: pytest.TestReport) -> Phase:
        """Return the phase of a report; for the report of a subtest, a phase that names it."""
        phase = phase_of(report, self._subtests)
        if phase.subtest:
            self._subtests.append(phase)
        else:
            self._subtests = []
        return phase


def phase_of(report: pytest.TestReport, subtests: Sequence[Phase] = ()) -> Phase:
    """Return the phase that a rank logs for a report.

    Args:
        report: The report of a phase, or of a subtest in it.
        subtests: The subtests that ran in this phase before.
    """
    result = _result_of(report)
    phase = Phase(
        when=str(report.when),
        outcome=result.outcome,
        message=result.message,
        text=result.text,
        location=result.location,
        subtest=name_of(report),
        lost=result.outcome == "failed" and getattr(report, LOST, False),
        assertion=result.outcome == "failed" and getattr(report, ASSERTION, False),
    )
    if phase.subtest:
        sections = _sections_of(report, phase.outcome)
        return dataclasses.replace(
            phase, text=excerpt(phase.text, TEXT_CHARACTERS), sections=sections
        )
    # The output of a passed phase is left out, but not if one of its subtests failed.
    outcome = "failed" if _failures(subtests) else phase.outcome
    sections = _sections_of(report, outcome)
    properties = []
    for name, value in report.user_properties:
        properties.append((name, _serializable(value)))
    phase = dataclasses.replace(phase, sections=sections, properties=tuple(properties))
    phase = with_subtests(phase, subtests)
    return dataclasses.replace(phase, text=excerpt(phase.text, TEXT_CHARACTERS))


@dataclass(frozen=True)
class _Result:
    """What pytest's report says of a phase.

    Attributes:
        outcome: ``passed``, ``failed``, ``skipped`` or ``xfailed``.
        message: One line: of the exception, or the reason of a skip or an xfail.
        text: The whole text.
        location: The path, the line (from 1) and the message of a failure or a skip, where pytest
            knows them.
    """

    outcome: str
    message: str
    text: str
    location: tuple[str, int, str] | None = None


def _result_of(report: pytest.TestReport) -> _Result:
    """Return what a report says, with xfail marks as outcomes of their own.

    A strict xpass, a test that passed although a strict xfail mark expects a failure, counts as
    passed, with its text. pytest's process makes it a failure if all ranks passed so.
    """
    text = report.longreprtext
    message = _last_line(report, text)
    # pytest sets ``wasxfail`` if an xfail mark applies: "skipped" is then an expected failure, and
    # "passed" an unexpected pass.
    if hasattr(report, "wasxfail"):
        if report.outcome == "skipped":
            return _Result("xfailed", str(report.wasxfail), text)
        return _Result("passed", "", text)
    if report.outcome == "failed":
        if text.startswith(STRICT_XPASS):
            return _Result("passed", message, text)
        return _Result("failed", message, text, _crash_location(report, message))
    if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
        path, line, reason = report.longrepr
        location = (str(path), int(line), str(reason))
        message = str(reason).removeprefix("Skipped: ")
        return _Result("skipped", message, f"{path}:{line}: {reason}", location)
    return _Result(report.outcome, message, text)


def _crash_location(report: pytest.TestReport, message: str) -> tuple[str, int, str] | None:
    """Return where a failure was raised; None if pytest does not know it."""
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is None:
        return None
    return str(crash.path), int(crash.lineno), message


def _last_line(report: pytest.TestReport, text: str) -> str:
    """Return the line of a report that says the most: the exception's message, or the last line."""
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        if not crash.message:
            return ""
        first_line = str(crash.message).splitlines()[0]
        return explained(first_line[:HEADLINE_CHARACTERS])
    last = ""
    for line in text.splitlines():
        if line.strip():
            last = line.strip()
    # An error without a crash location (an unknown fixture) still has lines that pytest marks with
    # E.
    for line in text.splitlines():
        if line.strip().startswith("E  "):
            return line.strip().removeprefix("E").strip()
    return last


def _sections_of(report: pytest.TestReport, outcome: str) -> Sections:
    """Return captured output: that of a phase that did not pass, and all of it at the teardown.

    pytest repeats in each report the sections of earlier phases. So the last report has the output
    of the whole test.

    Args:
        report: The report.
        outcome: The outcome of its phase, which a failed subtest may have changed.
    """
    if report.when != "teardown" and outcome == "passed":
        return ()
    sections = []
    for title, content in report.sections:
        sections.append((title, excerpt(content, SECTION_CHARACTERS)))
    return tuple(sections)


def _serializable(value: Any) -> Any:
    """Return the value of a property as a text, a number or None.

    For any other object this is its text, as JUnit's file has it.
    https://docs.pytest.org/en/stable/how-to/output.html#record-property
    """
    if not isinstance(value, (str, int, float, type(None))):
        try:
            value = str(value)
        except Exception as error:
            value = f"{type(value).__name__}, whose text cannot be made: {type(error).__name__}"
    if isinstance(value, str):
        return excerpt(value, TEXT_CHARACTERS)
    return value


# Subtests: parts of a test with reports of their own. One that fails makes its test fail. They are
# pytest 9's (fixture ``subtests``, unittest's ``subTest``) or those of the plugin pytest-subtests.
# In both, pytest's terminal plugin counts the failed ones. Ranks do not have it, so they are
# counted by the following functions.


def name_of(report: pytest.TestReport) -> str:
    """Return the name of a subtest, ``[message] (parameters)``; "" for a whole phase's report.

    A report of a subtest is recognized by not being a plain TestReport: pytest 8 has no class for
    it, and that of the plugin pytest-subtests has another name than that of pytest 9.
    """
    # The headline is the test's name with that of the subtest behind it.
    if type(report) is pytest.TestReport or not hasattr(report, "context"):
        return ""
    name = str(report.head_line).removeprefix(report.location[2]).strip()
    return name or "(<subtest>)"


def with_subtests(phase: Phase, subtests: Sequence[Phase]) -> Phase:
    """Return the phase with the results of the subtests that ran in it.

    It failed if one of them failed, whatever its own outcome is.

    Args:
        phase: The phase without them.
        subtests: Its subtests, in order.
    """
    sections = [*phase.sections, *_sections_of_subtests(subtests)]
    failures = _failures(subtests)
    if failures:
        failures += _failures([phase])
        sections += _sections_of_lost_peers(failures)
        phase = _failed_by(phase, _causes(failures))
    return dataclasses.replace(phase, sections=tuple(sections))


def _failures(phases: Sequence[Phase]) -> list[Phase]:
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
