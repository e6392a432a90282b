"""Known issues that the user declares: applied to reports of tests, and listed when they excuse nothing."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from pytest_distcompat.failures import DistcompatError
from pytest_distcompat.plugin.inside.launched import STARTS_RANKS
from pytest_distcompat.plugin.marked.declare import MARK, cell_of
from pytest_distcompat.plugin.marked.outcome import OUTCOME, RankFailure, unexcused
from pytest_distcompat.plugin.selection import is_partial, strip_group
from pytest_distcompat.plugin.session import SESSION, DistcompatSession
from pytest_distcompat.status import Status

if TYPE_CHECKING:
    from pytest_distcompat.cell import Cell
    from pytest_distcompat.known import KnownIssue
    from pytest_distcompat.plugin.marked.outcome import Outcome
    from pytest_distcompat.status import Verdict

#: The attribute of a report that carries the ``AppliedIssues`` of an item from an xdist worker to the controller.
ATTRIBUTE = "distcompat_declared"


@dataclass
class AppliedIssues:
    """Known issues applied to an item: those that cover it, and those that excuse its failure."""

    covering: list[str] = field(default_factory=list)
    used: list[str] = field(default_factory=list)


APPLIED: pytest.StashKey[AppliedIssues] = pytest.StashKey()


def apply_known_issues(
    item: pytest.Item, report: pytest.TestReport, *, hard: bool, outcome: Outcome | None = None
) -> None:
    """Apply the user's known issues to the report of an item's call, if it is a distributed test, and attach them to it.

    ``hard``: it ended by more than an exception, which is never excused. By default a marked test has its own ranks' outcome.
    """
    marked = item.get_closest_marker(MARK) is not None
    if marked or item.stash.get(STARTS_RANKS, False):
        outcome = outcome or item.stash.get(OUTCOME, None)
        declared_of(item.config.stash[SESSION]).apply_to_report(item, report, cell_of(item), outcome, hard=hard)
    if APPLIED in item.stash:
        setattr(report, ATTRIBUTE, asdict(item.stash[APPLIED]))


def take_xfail_from_hard(report: pytest.TestReport, error: BaseException) -> None:
    """Undo the xfail of a test that ended by more than an exception: a crash, a hang, a leak."""
    if hasattr(report, "wasxfail") and is_hard(error):
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
    """Return the session's ``Declared``, which is made on first use."""
    if DECLARED not in session.config.stash:
        session.config.stash[DECLARED] = Declared(session)
    return session.config.stash[DECLARED]


class Declared:
    """Applies the user's known issues to items where they run, and counts them where reports are gathered."""

    def __init__(self, session: DistcompatSession) -> None:
        self._session = session
        self._covered: Counter[str] = Counter()
        self._used: Counter[str] = Counter()
        self._broken_off = False

    @functools.cached_property
    def _in_force(self) -> tuple[KnownIssue, ...]:
        return tuple(issue for issue in self._session.own if issue.there(self._session.device) and not issue.ended)

    def note_verdict(self, item: pytest.Item, known: Iterable[KnownIssue], cell: Cell, verdict: Verdict) -> None:
        """Note which of the user's issues cover an item of a suite, and which of them excuse its failure."""
        item.stash[APPLIED] = applied = AppliedIssues()
        own = self._session.own if verdict.status is not Status.SKIPPED else ()
        excused = verdict.status in {Status.KNOWN, Status.REFUSED}
        reasons = {*(verdict.reasons or [verdict.reason])} if excused else set()
        for issue in (issue for issue in known if issue in own):
            expected = [expectation for expectation in issue.expectations if expectation.covers(cell, verdict.check)]
            if expected:
                applied.covering.append(issue.where)
                if reasons & {expectation.reason for expectation in expected}:
                    applied.used.append(issue.where)

    def apply_to_report(
        self, item: pytest.Item, report: pytest.TestReport, cell: Cell | None, outcome: Outcome | None, *, hard: bool
    ) -> None:
        """Turn a declared failure into an xfail, and a pass where a failure is declared strictly into a failure.

        A crash or a hang is ``hard`` and never excused. A report that an xfail mark decided stays as it is.
        """
        item.stash[APPLIED] = applied = AppliedIssues()
        if report.skipped or hasattr(report, "wasxfail"):
            return
        nodeid = strip_group(item.config, item.nodeid)
        there = [issue for issue in self._session.own if issue.there(self._session.device)]
        candidates = [(issue.where, expected) for issue in there if (expected := issue.expected_of(nodeid, cell))]
        covering = {where: expected for where, expected in candidates if not expected.ended}
        applied.covering.extend(covering)
        if report.failed and not hard:
            text = report.longreprtext
            if outcome is not None and outcome.text and text.startswith(outcome.text):
                # Without the commands after it, which name the test and would match its name.
                text = outcome.text
            reasons = {where: expected.reason for where, expected in covering.items() if expected.matches(text)}
            if reasons:
                applied.used.extend(reasons)
                report.outcome = "skipped"
                report.wasxfail = next(iter(reasons.values()))  # as pytest's xfail does
            elif over := next((one for one in candidates if one[1].ended and one[1].matches(text)), None):
                note = f"the quarantine ended on {over[1].until}: {over[0]}"
                report.longrepr = f"{report.longreprtext}\n\n{note}"
        elif report.passed:
            strict = [where for where, expected in covering.items() if expected.strict]
            if strict:
                report.outcome = "failed"
                report.longrepr = f"declared to fail, but it passes: fixed? Then remove {strict[0]}"

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count the issues that cover the item and those that excuse it."""
        applied = AppliedIssues(**getattr(report, ATTRIBUTE, {}))
        self._covered.update(applied.covering)
        self._used.update(applied.used)

    def stale(self) -> list[str]:
        """Return the issues that excused nothing, each with the number of items that it covers.

        If only a part of the tests was selected, or the session ended early, an issue that covers nothing is not stale: the
        tests that it covers may be among those that did not run.
        """
        lines = []
        left_out = self._broken_off or is_partial(self._session.config)
        for issue in self._in_force:
            covered = self._covered[issue.where]
            if self._used[issue.where] or (left_out and not covered):
                continue
            coverage = f"covers {covered} that ran, excused none" if covered else "covers nothing that ran"
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
        session = self._session
        waiting = [issue for issue in session.own if issue not in self._in_force]
        lines = [f"remove me: {line}" for line in self.stale()]
        for issue in waiting:
            over = [f"ended on {issue.until}"] if issue.ended else []
            lines.append(f"not in force here: {issue.where}: {', '.join((*issue.waits_for(session.device), *over))}")
        if lines:
            terminalreporter.section("declared known issues")
            for line in lines:
                terminalreporter.write_line(line, yellow=line.startswith("remove"))


DECLARED: pytest.StashKey[Declared] = pytest.StashKey()
