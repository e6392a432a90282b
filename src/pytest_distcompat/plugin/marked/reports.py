"""From pytest's reports of an item on a rank to the phases that the rank logs.

A *rank* is one of the processes on which a test with ``@pytest.mark.distcompat`` runs. pytest makes
a report of each phase of the item there: setup, call and teardown. ``rank_reporter`` has the hooks
that get these reports, and calls ``mark_exception`` and ``Phases.of``. A ``Phase`` is plain data,
which pytest's process reads after the run.

A *subtest* is a part of a test with a report of its own. One that fails makes its test fail. It is
one of pytest 9 (fixture ``subtests``, unittest's ``subTest``) or of the plugin pytest-subtests. In
both, pytest's terminal plugin counts the failed ones. Ranks do not have that plugin, so that
``subtests`` counts them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from _pytest._code.code import ExceptionRepr

from pytest_distcompat.excerpt import excerpt, explained
from pytest_distcompat.missing_module import hint_of
from pytest_distcompat.plugin.marked.phase import (
    SECTION_CHARACTERS,
    STRICT_XPASS,
    Phase,
    Sections,
)
from pytest_distcompat.plugin.marked.subtests import failed_phases, with_subtests

#: The text of an exception and the value of a property are cut to this many characters: pytest's
#: process has all of them in memory.
TEXT_CHARACTERS = 2**20

#: The first line of an exception is cut to this many characters where it becomes a headline.
HEADLINE_CHARACTERS = 500

#: The attribute that ``mark_exception`` sets on a rank's report if it failed only because another
#: rank is gone.
LOST = "distcompat_lost_peer"

#: The attribute that it sets if the report failed by an assertion or ``pytest.fail``.
ASSERTION = "distcompat_assertion"


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
    # torch.distributed raised it, with a message such as "Connection closed by peer".
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
    outcome = "failed" if failed_phases(subtests) else phase.outcome
    sections = _sections_of(report, outcome)
    properties = []
    for name, value in report.user_properties:
        properties.append((name, _serializable(value)))
    phase = dataclasses.replace(phase, sections=sections, properties=tuple(properties))
    # The phase fails if one of its subtests failed, and gets their texts and output.
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
        # ``explained`` adds the likely cause to the exception of a debugger that quit.
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
