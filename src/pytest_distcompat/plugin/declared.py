"""The known issues that the user declares: what they excuse of marked tests and scripts, and which of them can go."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from pytest_distcompat.failures import DistcompatError
from pytest_distcompat.plugin.marked.marker import MARK, OUTCOME, cell_of
from pytest_distcompat.plugin.marked.outcome import RankFailure
from pytest_distcompat.plugin.nodeids import strip_group
from pytest_distcompat.plugin.selection import partial
from pytest_distcompat.plugin.session import SESSION, DistcompatSession

if TYPE_CHECKING:
    from pytest_distcompat.cell import Cell
    from pytest_distcompat.judge import Verdict
    from pytest_distcompat.known import KnownIssue
    from pytest_distcompat.plugin.marked.outcome import Outcome

#: The attribute of a report that carries, from an xdist worker to the controller, the entries that cover the item and those
#: that it failed by.
ATTRIBUTE = "distcompat_declared"


@dataclass
class Weighed:
    """The entries that an item was weighed by: those that cover it, and those that it failed by."""

    covering: list[str] = field(default_factory=list)
    used: list[str] = field(default_factory=list)


WEIGHED: pytest.StashKey[Weighed] = pytest.StashKey()


def weigh(item: pytest.Item, report: pytest.TestReport, *, hard: bool, outcome: Outcome | None = None) -> None:
    """Weigh the report of an item's call, if it is one of ours; what it was weighed by travels with it.

    ``outcome`` is what ranks came to; that of a marked test's own ranks unless given.
    """
    marked = item.get_closest_marker(MARK) is not None
    if marked or "distcompat" in getattr(item, "fixturenames", ()):
        outcome = outcome or item.stash.get(OUTCOME, None)
        declared_of(item.config.stash[SESSION]).weigh_report(item, report, cell_of(item), outcome, hard=hard)
    if WEIGHED in item.stash:
        setattr(report, ATTRIBUTE, asdict(item.stash[WEIGHED]))


def is_hard(error: BaseException) -> bool:
    """Whether more happened than an exception; also where the test raised another one because of that."""
    causes: list[BaseException | None] = [error]
    seen: set[int] = set()  # an exception can be raised from one that is raised from it
    while causes:
        one = causes.pop()
        if one is None or id(one) in seen:
            continue
        if isinstance(one, (DistcompatError, RankFailure)) and one.hard:
            return True
        seen.add(id(one))
        causes += [one.__cause__, one.__context__]
    return False


def _own_words(report: pytest.TestReport, outcome: Outcome | None) -> str:
    """What the failure itself says: not the commands behind it, which name the test and would make it match."""
    if outcome is not None and outcome.text and str(report.longrepr).startswith(outcome.text):
        return outcome.text
    return report.longreprtext


def declared_of(session: DistcompatSession) -> Declared:
    """What the session's user declares, and what came of it."""
    if DECLARED not in session.config.stash:
        session.config.stash[DECLARED] = Declared(session)
    return session.config.stash[DECLARED]


class Declared:
    """Weighs items by the user's own entries where they run, and counts where reports come together."""

    def __init__(self, session: DistcompatSession) -> None:
        self._session = session
        self._covered: Counter[str] = Counter()
        self._used: Counter[str] = Counter()
        self._broken_off = False

    @functools.cached_property
    def _in_force(self) -> tuple[KnownIssue, ...]:
        return tuple(issue for issue in self._session.own if issue.there(self._session.device))

    def weigh_verdict(self, item: pytest.Item, known: Iterable[KnownIssue], cell: Cell, verdict: Verdict) -> None:
        """Note which of the user's entries are about an item of a suite, and by which one it is known."""
        item.stash[WEIGHED] = weighed = Weighed()
        own = self._session.own if verdict.status != "skipped" else ()
        reasons = {*(verdict.reasons or [verdict.reason])} if verdict.status in {"known", "refused"} else set()
        for issue in (one for one in known if one in own):
            expected = [one for one in issue.expectations if one.covers(cell, verdict.check)]
            if expected:
                weighed.covering.append(issue.where)
                if reasons & {one.reason for one in expected}:
                    weighed.used.append(issue.where)

    def weigh_report(
        self, item: pytest.Item, report: pytest.TestReport, cell: Cell | None, outcome: Outcome | None, *, hard: bool
    ) -> None:
        """Make a failure that is declared an expected one, and a success where a failure is declared strictly no success.

        A crash or a hang is ``hard``: never expected. What an xfail mark has spoken of stays as it is.
        """
        item.stash[WEIGHED] = weighed = Weighed()
        if report.skipped or hasattr(report, "wasxfail"):
            return
        nodeid = strip_group(item.config, item.nodeid)
        found = [(issue.where, issue.expected_of(nodeid, cell)) for issue in self._in_force]
        covering = {where: expected for where, expected in found if expected is not None}
        weighed.covering.extend(covering)
        if report.failed and not hard:
            text = _own_words(report, outcome)
            shown = {where: expected.reason for where, expected in covering.items() if expected.matches(text)}
            if shown:
                weighed.used.extend(shown)
                report.outcome = "skipped"
                report.wasxfail = next(iter(shown.values()))  # as pytest's xfail does
        elif report.passed:
            strict = [where for where, expected in covering.items() if expected.strict]
            if strict:
                report.outcome = "failed"
                report.longrepr = f"declared to fail, but it passes: fixed? Then remove {strict[0]}"

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count."""
        weighed = Weighed(**getattr(report, ATTRIBUTE, {}))
        self._covered.update(weighed.covering)
        self._used.update(weighed.used)

    def stale(self) -> list[str]:
        """The entries that excused nothing, with what they were measured by.

        None that covers nothing in a run that was narrowed, or that ended early: that left out what it is about, perhaps.
        """
        found = []
        left_out = self._broken_off or partial(self._session.config)
        for issue in self._in_force:
            covered = self._covered[issue.where]
            if self._used[issue.where] or (left_out and not covered):
                continue
            told = f"covers {covered} that ran, excused none" if covered else "covers nothing that ran"
            found.append(f"{issue.where}: {told}")
        return found

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Notice that not all was run."""
        stopped = bool(session.shouldfail or session.shouldstop)
        self._broken_off = stopped or exitstatus == pytest.ExitCode.INTERRUPTED

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: Any, config: pytest.Config) -> None:
        """Say which entries can go, and which wait for other versions or devices."""
        if config.option.collectonly:
            return
        waiting = [issue for issue in self._session.own if issue not in self._in_force]
        lines = [f"remove me: {line}" for line in self.stale()]
        lines += [
            f"not in force here: {issue.where}: {', '.join(issue.waits_for(self._session.device))}" for issue in waiting
        ]
        if lines:
            terminalreporter.section("declared known issues")
            for line in lines:
                terminalreporter.write_line(line, yellow=line.startswith("remove"))


DECLARED: pytest.StashKey[Declared] = pytest.StashKey()
