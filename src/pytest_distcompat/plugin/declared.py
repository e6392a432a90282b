"""Known issues that the user declares: applied to reports, and listed when they excuse nothing.

A *known issue* is a bug for which a failure is expected, from a TOML file that
``--distcompat-known`` names. Its ``where`` is its place in that file, as ``known issues known.toml:
issue 2 (its title)``. It *covers* an item if it is about it, and it *excuses* the item's failure if
the failure's message matches too. It may have a last day (``until``), after which it has *ended*.
What it expects of one item, as ``fails("names", match="other names")``, is an ``Expectation``.

Issues are applied in the process where an item runs, as in an xdist worker. There are two ways:

- An item of a suite (a subclass of ``CompatSuite``) is one check in one *cell*, a configuration
  such as ``fsdp2-fp32-w2``. Its *verdict* is passed, failed, known and so on. The module ``judge``
  applies all known issues when it makes the verdict; ``note_verdict`` only notes which of the
  user's it used.
- For a test with ``@pytest.mark.distcompat``, which runs on *ranks* (processes of a process group),
  and for an ordinary test that starts ranks itself, ``apply_known_issues`` turns a declared failure
  into an xfail. The hook ``pytest_runtest_makereport`` calls it.

In the process with the terminal the hooks of ``Declared`` count what reports say, and print the
issues that can be removed.

``session.own`` has the user's issues; those that this package ships are not among them.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from pytest_distcompat.failures import DistcompatError
from pytest_distcompat.plugin.marked.declare import MARK, cell_of
from pytest_distcompat.plugin.marked.outcome import OUTCOME, RankFailure, unexcused
from pytest_distcompat.plugin.on_ranks.launched import STARTS_RANKS
from pytest_distcompat.plugin.selection import is_partial, strip_group
from pytest_distcompat.plugin.session import SESSION, DistcompatSession
from pytest_distcompat.status import Status

if TYPE_CHECKING:
    from pytest_distcompat.cell import Cell
    from pytest_distcompat.expect import Expectation
    from pytest_distcompat.known import KnownIssue
    from pytest_distcompat.plugin.marked.outcome import Outcome
    from pytest_distcompat.status import Verdict

#: The attribute of a report that carries the ``AppliedIssues`` of an item from an xdist worker to
#: the controller.
ATTRIBUTE = "distcompat_declared"


@dataclass
class AppliedIssues:
    """The user's known issues that were applied to an item, each by its ``where``."""

    #: Those that cover the item.
    covering: list[str] = field(default_factory=list)
    #: Those of them that excuse its failure.
    used: list[str] = field(default_factory=list)


#: Where an item has its ``AppliedIssues``.
APPLIED: pytest.StashKey[AppliedIssues] = pytest.StashKey()


def apply_known_issues(
    item: pytest.Item, report: pytest.TestReport, *, hard: bool, outcome: Outcome | None = None
) -> None:
    """Apply the user's known issues to the report of an item's call, and attach them to it.

    An item that is no distributed test is left alone.

    Args:
        item: The item.
        report: The report of its call, which is changed in place.
        hard: Whether it ended by more than an exception, which is never excused.
        outcome: The outcome of its ranks; by default the one in the stash of a marked test.
    """
    marked = item.get_closest_marker(MARK) is not None
    if marked or item.stash.get(STARTS_RANKS, False):
        outcome = outcome or item.stash.get(OUTCOME, None)
        declared_of(item.config.stash[SESSION]).apply_to_report(
            item, report, cell_of(item), outcome, hard=hard
        )
    # Also that of an item of a suite, see ``Declared.note_verdict``.
    if APPLIED in item.stash:
        setattr(report, ATTRIBUTE, asdict(item.stash[APPLIED]))


def take_xfail_from_hard(report: pytest.TestReport, error: BaseException) -> None:
    """Undo the xfail of a test that ended by more than an exception: a crash, a hang, a leak.

    Args:
        report: pytest's report of the test, which is changed in place.
        error: The exception that the test raised.
    """
    if hasattr(report, "wasxfail") and is_hard(error):
        # The report is that of a failure then.
        unexcused(report)


def is_hard(error: BaseException) -> bool:
    """Tell whether an exception, or one of its causes, stands for a crash, a hang or a leak."""
    causes: list[BaseException | None] = [error]
    visited: set[int] = set()  # a chain of causes can be circular
    while causes:
        cause = causes.pop()
        if cause is None or id(cause) in visited:
            continue
        if isinstance(cause, (DistcompatError, RankFailure)) and cause.hard:
            return True
        visited.add(id(cause))
        causes += [cause.__cause__, cause.__context__]
    return False


def declared_of(session: DistcompatSession) -> Declared:
    """Return the ``Declared`` of this process, which is made on first use."""
    if DECLARED not in session.config.stash:
        session.config.stash[DECLARED] = Declared(session)
    return session.config.stash[DECLARED]


class Declared:
    """The user's known issues in one pytest process.

    It applies them where items run, and counts them where reports are gathered.
    """

    def __init__(self, session: DistcompatSession) -> None:
        self._session = session
        #: The ``where`` of an issue to the number of items that it covers.
        self._covered: Counter[str] = Counter()
        #: The ``where`` of an issue to the number of items whose failure it excuses.
        self._used: Counter[str] = Counter()
        #: Whether the session ended before all tests ran.
        self._broken_off = False

    @functools.cached_property
    def _of_this_machine(self) -> tuple[KnownIssue, ...]:
        """The user's issues that are about the installed versions and this device.

        Those whose last day is over are among them: a failure then says that it was excused.
        """
        issues = []
        for issue in self._session.own:
            if issue.applies_on(self._session.device):
                issues.append(issue)
        return tuple(issues)

    @functools.cached_property
    def _in_force(self) -> tuple[KnownIssue, ...]:
        """The user's issues that excuse failures here: those that have not ended."""
        issues = []
        for issue in self._of_this_machine:
            if not issue.ended:
                issues.append(issue)
        return tuple(issues)

    def note_verdict(
        self, item: pytest.Item, known: Iterable[KnownIssue], cell: Cell, verdict: Verdict
    ) -> None:
        """Note which of the user's issues cover an item of a suite, and which excuse it.

        Args:
            item: The item of the suite.
            known: All issues that may cover it, those of this package too.
            cell: The cell of the item.
            verdict: Its verdict, for which the issues were used.
        """
        applied = AppliedIssues()
        item.stash[APPLIED] = applied
        if verdict.status is Status.SKIPPED:
            return
        # The verdict has the reasons of the expectations by which it was judged.
        excusing: set[str] = set()
        if verdict.status in {Status.KNOWN, Status.REFUSED}:
            excusing = set(verdict.reasons or [verdict.reason])
        for issue in known:
            if issue not in self._session.own:
                continue
            reasons = set()
            for expectation in issue.expectations:
                if expectation.covers(cell, verdict.check):
                    reasons.add(expectation.reason)
            if reasons:
                applied.covering.append(issue.where)
            if reasons & excusing:
                applied.used.append(issue.where)

    def apply_to_report(
        self,
        item: pytest.Item,
        report: pytest.TestReport,
        cell: Cell | None,
        outcome: Outcome | None,
        *,
        hard: bool,
    ) -> None:
        """Turn a declared failure into an xfail, and an unexpected pass into a failure.

        A pass is a failure where an issue declares strictly that the test fails. A report that an
        xfail mark decided stays as it is.

        Args:
            item: A marked test, or a test that starts ranks itself.
            report: The report of its call, which is changed in place.
            cell: The cell of a marked test; None if it has none.
            outcome: The outcome of its ranks, if that is known.
            hard: Whether it crashed, hung or leaked, which is never excused.
        """
        applied = AppliedIssues()
        item.stash[APPLIED] = applied
        if report.skipped or hasattr(report, "wasxfail"):
            return
        covering: dict[str, Expectation] = {}
        ended: list[_EndedIssue] = []
        nodeid = strip_group(item.config, item.nodeid)
        for issue in self._of_this_machine:
            # None if the issue is about other tests or cells, or about a suite's checks.
            expectation = issue.expectation_for(nodeid, cell)
            if expectation is None:
                continue
            if expectation.ended:
                ended.append(_EndedIssue(issue.where, expectation))
            else:
                covering[issue.where] = expectation
        applied.covering.extend(covering)
        if report.passed:
            _fail_unexpected_pass(report, covering)
        elif report.failed and not hard:
            text = _text_of_failure(report, outcome)
            excusing = _matching(covering, text)
            if excusing:
                applied.used.extend(excusing)
                report.outcome = "skipped"
                report.wasxfail = next(iter(excusing.values())).reason  # as pytest's xfail does
            else:
                _note_ended(report, ended, text)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count the issues that cover the item and those that excuse it."""
        applied = AppliedIssues(**getattr(report, ATTRIBUTE, {}))
        self._covered.update(applied.covering)
        self._used.update(applied.used)

    def stale(self) -> list[str]:
        """Return a line for each issue that excused nothing, and so can be removed.

        If only a part of the tests was selected, or the session ended early, an issue that covers
        nothing is not stale: the tests that it covers may be among those that did not run.
        """
        lines = []
        # Whether tests were left out: the session broke off, or the user selected some.
        incomplete = self._broken_off or is_partial(self._session.config)
        for issue in self._in_force:
            covered = self._covered[issue.where]
            if self._used[issue.where] or (incomplete and not covered):
                continue
            coverage = "covers nothing that ran"
            if covered:
                coverage = f"covers {covered} that ran, excused none"
            lines.append(f"{issue.where}: {coverage}")
        return lines

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Note whether the session ended before all tests ran."""
        stopped = bool(session.shouldfail or session.shouldstop)
        self._broken_off = stopped or exitstatus == pytest.ExitCode.INTERRUPTED

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: Any, config: pytest.Config) -> None:
        """Print which issues can be removed, and which are for other versions or devices."""
        if config.option.collectonly:
            return
        lines = [f"remove me: {line}" for line in self.stale()]
        for issue in self._session.own:
            if issue in self._in_force:
                continue
            # Such as ``accelerate>=1.7`` with an older release, or ``cuda`` on the CPU.
            reasons = list(issue.missing_requirements(self._session.device))
            if issue.ended:
                reasons.append(f"ended on {issue.until}")
            missing = ", ".join(reasons)
            lines.append(f"not in force here: {issue.where}: {missing}")
        if lines:
            terminalreporter.section("declared known issues")
            for line in lines:
                terminalreporter.write_line(line, yellow=line.startswith("remove"))


@dataclass(frozen=True)
class _EndedIssue:
    """An issue that covers an item and whose last day is over."""

    #: The place of the issue in its file.
    where: str
    #: What it expects of the item.
    expectation: Expectation


def _text_of_failure(report: pytest.TestReport, outcome: Outcome | None) -> str:
    """Return what a failure says, without the commands after it that repeat the test.

    These have the test's name, which the regular expression of an issue must not match.
    """
    text = report.longreprtext
    if outcome is not None and outcome.text and text.startswith(outcome.text):
        return outcome.text
    return text


def _matching(covering: Mapping[str, Expectation], text: str) -> dict[str, Expectation]:
    """Return the entries of ``covering`` whose expectation matches the text of a failure.

    Args:
        covering: The ``where`` of an issue to what it expects of the item.
        text: The text of the failure.
    """
    return {
        where: expectation for where, expectation in covering.items() if expectation.matches(text)
    }


def _fail_unexpected_pass(report: pytest.TestReport, covering: Mapping[str, Expectation]) -> None:
    """Make the report of a passed test a failure, if an issue says strictly that it fails.

    Args:
        report: The report, which is changed in place.
        covering: The ``where`` of an issue to what it expects of the item.
    """
    for where, expectation in covering.items():
        if expectation.strict:
            report.outcome = "failed"
            report.longrepr = f"declared to fail, but it passes: fixed? Then remove {where}"
            return


def _note_ended(report: pytest.TestReport, ended: Iterable[_EndedIssue], text: str) -> None:
    """Add to the report of a failure that an issue excused it until its last day."""
    for issue in ended:
        if issue.expectation.matches(text):
            note = f"the quarantine ended on {issue.expectation.until}: {issue.where}"
            report.longrepr = f"{report.longreprtext}\n\n{note}"
            return


#: Where the pytest configuration has its ``Declared``.
DECLARED: pytest.StashKey[Declared] = pytest.StashKey()
