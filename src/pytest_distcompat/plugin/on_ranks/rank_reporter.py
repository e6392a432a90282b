"""The plugin that writes to a rank's log what pytest reports of an item on that rank.

A *rank* is one process of the process group on which a marked test runs. ``rank_session.reporting``
registers the plugin once in a rank and calls ``begin`` for each item. From then on each report of
pytest becomes a ``Phase`` in the log, a line of JSON in ``rank-0.jsonl`` for rank 0. After the run
pytest's process reads the logs of all ranks and makes one outcome of them (``marked.merge``).

The plugin also decides how the rank goes on. A rank that failed ends at once. A rank that skipped
or xfailed waits until the outcomes of the other ranks are known.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_distcompat import clock
from pytest_distcompat.events import Done, Error, Event, Excused, Resumed, of_kind
from pytest_distcompat.plugin.marked.phase import Phase
from pytest_distcompat.plugin.marked.reports import Phases, mark_exception

if TYPE_CHECKING:
    from pytest_distcompat.launch.rank_log import RankLog

#: Seconds that a rank which skipped or xfailed waits for the others in a run started by hand, which
#: no watchdog supervises.
WAIT_BY_HAND_S = 5.0


class RankReporter:
    """Writes the phases of the item to the rank's log, and ends the rank at the first failure.

    A phase is the setup, the call or the teardown of an item, with its outcome. A rank that failed
    runs no teardown: fixtures of distributed tests would wait there for peers that are not in a
    teardown.
    """

    #: The name under which pytest's plugin manager has the reporter.
    _NAME = "distcompat-rank"
    #: The modules ``launch.rank`` and ``launch.rank_log``, imported by ``begin``.
    _rank: Any
    _rank_log: Any

    @classmethod
    def of(cls, config: pytest.Config) -> RankReporter:
        """Return the reporter of this process, which is registered once: that takes a while."""
        manager = config.pluginmanager
        if not manager.has_plugin(cls._NAME):
            manager.register(cls(), cls._NAME)
        reporter = manager.get_plugin(cls._NAME)
        assert isinstance(reporter, cls)
        return reporter

    def begin(self, log: RankLog, world_size: int, directory: Path) -> None:
        """Report to that log from now on.

        Args:
            log: The log of this rank.
            world_size: The number of ranks that run the item.
            directory: The directory of the run, with the logs of all ranks.
        """
        # Imported before the test runs, which may break imports (sys.path, sys.meta_path).
        from pytest_distcompat.launch import rank, rank_log

        self.log = log
        self.phases = Phases()
        self.world_size = world_size
        self.directory = directory
        self._rank = rank
        self._rank_log = rank_log

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Note in the report what kind of exception it is, and start the debugger if one is wanted.

        The report itself has only the exception's text. ``mark_exception`` sets attributes that
        ``Phases.of`` reads, such as whether the exception only says that another rank is gone.
        """
        report = yield
        mark_exception(report, call, item.config.rootpath)
        if report.failed and call.excinfo is not None:
            self._rank.debug(self.log, call.excinfo.value)
        return report

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Log the phase that a report is about; end this process if the test ends here.

        It does not return for a rank that failed, or that skipped while the others go on.
        """
        phase = self.phases.of(report)
        self.log.write(phase)
        # None after a phase that passed. Else what the error is called, and its message:
        # ``("failed", "failed in setup: RuntimeError: no GPU")``, or ``(SKIPPED_ELSEWHERE, ...)``
        # and ``(XFAILED, ...)``.
        if phase.ending is None:
            return
        kind, message = phase.ending
        if phase.outcome == "failed" or not self._wait_for_others(kind, message, phase):
            self.log.write(Error(kind, message, phase.text, lost=phase.lost))
            # Ends this process, without leaving the process group.
            self._rank.leave_failed(self.directory, self.world_size)

    def _wait_for_others(self, kind: str, message: str, phase: Phase) -> bool:
        """Wait for the other ranks' outcomes; return whether all ranks go on to their teardowns.

        This rank has skipped or xfailed. The others may do so too, or pass, or fail, within the
        time limit of the test. They may also wait for this rank in a collective: then the
        launcher's watchdog, which reads the logs too, ends all ranks.

        Args:
            kind: The kind of the phase's ending: ``SKIPPED_ELSEWHERE`` or ``XFAILED``.
            message: Its message, for the log.
            phase: The phase in which this rank skipped or xfailed.
        """
        self.log.write(Excused(kind, message, phase.text))
        deadline = math.inf
        if self.log.by_hand:
            # No watchdog in pytest's process ends the ranks.
            deadline = clock.now() + WAIT_BY_HAND_S
        own_outcome = phase.outcome
        others = list(range(self.world_size))
        others.remove(self.log.rank)
        logs = self._rank_log.LogReader(self.directory, others)
        while clock.now() < deadline:
            outcomes = set()
            for events in logs.read().values():
                outcomes.add(self._outcome_of(events, phase.when))
            # Nothing that the other ranks still do can make these outcomes agree.
            if "failed" in outcomes or (own_outcome == "skipped" and "passed" in outcomes):
                return False
            # All are known. A skip must be a skip on all ranks; an expected failure may pass on
            # some.
            if "" not in outcomes:
                compatible = {"skipped"} if own_outcome == "skipped" else {"xfailed", "passed"}
                goes_on = outcomes <= compatible
                if goes_on:
                    self.log.write(Resumed())
                return goes_on
            clock.sleep(0.02)
        return False

    @staticmethod
    def _outcome_of(events: Sequence[Event], when: str) -> str:
        """Return another rank's outcome by its events; empty while the outcome may still change.

        A rank has passed once only its teardown is left. If this rank skipped in its own teardown,
        another rank has passed once its teardown has ended too.

        Args:
            events: The events that the other rank has logged so far.
            when: The phase in which this rank is: ``setup``, ``call`` or ``teardown``.

        Returns:
            ``skipped``, ``xfailed``, ``failed``, ``passed`` or an empty text.
        """
        phases = {}
        for phase in of_kind(Phase, events):
            if not phase.subtest:
                phases[phase.when] = phase.outcome
        for outcome in phases.values():
            if outcome in {"skipped", "xfailed"}:
                return outcome
        if of_kind(Error, events):
            return "failed"
        last_phase = "teardown" if when == "teardown" else "call"
        if of_kind(Done, events) or last_phase in phases:
            return "passed"
        return ""
