"""pytest as one rank of another launcher: ``torchrun --nproc-per-node 2 -m pytest``.

torchrun starts two processes, each of which runs pytest with all tests. ``plugin`` calls ``enter``
in each of them. It registers ``Inside``, whose hooks keep the ranks in step: after each phase of a
test (setup, call, teardown) the ranks exchange what happened, by way of a ``Lockstep``, and agree
on one outcome. If rank 1 fails a test, the reports of all ranks say that it failed. Only rank 0
writes to the terminal.

Fixtures such as ``rank`` and ``world`` work as on ranks that this package starts. Tests that start
ranks themselves (a ``CompatSuite``, scripts) are skipped.
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any, Literal

import pytest

from pytest_distcompat import clock
from pytest_distcompat.ext.inside.agreement import POSTPONED, impose
from pytest_distcompat.ext.inside.collection import differences
from pytest_distcompat.ext.inside.lockstep import Gone, Lockstep
from pytest_distcompat.ext.inside.termination import Termination
from pytest_distcompat.plugin.current import session_of
from pytest_distcompat.plugin.declared import apply_known_issues, declared_of
from pytest_distcompat.plugin.marked.declare import cell_of, mark_of
from pytest_distcompat.plugin.marked.outcome import Outcome
from pytest_distcompat.plugin.marked.reports import LOST, Phases, mark_exception, name_of
from pytest_distcompat.plugin.marked.run import TIME_LIMIT
from pytest_distcompat.plugin.on_ranks import launched
from pytest_distcompat.plugin.on_ranks.launched import COLLECTS, ON_RANK, SHARED, WORLD
from pytest_distcompat.plugin.on_ranks.rank_session import SILENCING_OPTIONS
from pytest_distcompat.plugin.session import DistcompatSession, session_basetemp
from pytest_distcompat.world import World

#: By the name of a fixture that starts ranks: the beginning of the reason to skip its tests.
_STARTING = {
    "distcompat_case": "a suite starts ranks",
    "distcompat": "the fixture distcompat starts ranks",
    "distcompat_lent": "the test starts ranks",
}
#: Why the session ends before all its tests have run.
_STOP_REASON = "a rank of the launch has ended, or hangs: there is nothing to go on with"


def enter(config: pytest.Config) -> None:
    """Set this pytest up as a rank of the launch.

    Raises:
        pytest.UsageError: Under pytest-xdist, whose workers would each run other tests.
    """
    # This process is a rank, and runs all tests that it collects. The stash is pytest's dict for
    # plugins' data; other modules of this package look there.
    config.stash[ON_RANK] = config.stash[COLLECTS] = True
    session = session_of(config)
    # A pytest that a test starts must not take itself for a rank.
    launched.hide_from_children()
    if getattr(config.option, "dist", "no") != "no" or hasattr(config, "workerinput"):
        raise pytest.UsageError(
            "pytest inside a launch: its ranks cannot share tests out with xdist; "
            "leave out -n and --dist"
        )
    world = World.from_environment(session.device)
    session.world_size = world.size
    config.stash[WORLD] = world
    if world.rank:
        # Options of the terminal and of report files, which are for rank 0 only: each with the
        # value that silences it.
        for name, value in SILENCING_OPTIONS.items():
            if hasattr(config.option, name):
                setattr(config.option, name, value)
        if config.option.basetemp:
            # pytest empties this directory, so each rank needs another one.
            config.option.basetemp = f"{config.option.basetemp}-rank{world.rank}"
    config.pluginmanager.register(Inside(session, world), "distcompat-inside-rank")
    config.pluginmanager.register(declared_of(session), "distcompat-declared")


class Inside:
    """pytest's hooks on one rank of an external launch.

    Args:
        session: The package's settings for this session of pytest.
        world: The place of this rank: its number, and the number of ranks.
    """

    def __init__(self, session: DistcompatSession, world: World) -> None:
        self._session = session
        self._world = world
        self._termination = Termination()
        #: By it the ranks agree; None until all tests are collected.
        self._lockstep: Lockstep | None = None
        #: pytest's own session, to stop it; None until all tests are collected.
        self._pytest: pytest.Session | None = None
        #: The errors of collection on this rank: ``test_a.py: ImportError: ...``.
        self._collection_errors: list[str] = []
        #: Whether the ranks cannot go on together, because one has ended or hangs. From then on no
        #: outcomes are exchanged, and this rank only tears down.
        self._over = False
        #: The exception that ends the session on this rank, as text: ``pytest.exit`` or Ctrl-C;
        #: empty without one.
        self._exit = ""

        # The test that is running.
        self._item: pytest.Item | None = None
        self._when: Literal["setup", "call", "teardown"] = "setup"
        #: Gathers the reports of the phase that is running, subtests included.
        self._phases = Phases()
        #: Whether the test function is running.
        self._calling = False
        #: The time limit in seconds, and when it ends, in seconds of CLOCK_MONOTONIC.
        self._limit = 0.0
        self._deadline = 0.0
        #: Whether any rank's ``Lockstep`` has closed the rank's connections in this test, because
        #: another rank had left the phase without passing it.
        self._cut = False
        #: The exception of this rank's setup, to be raised in the call (``agreement.POSTPONED``).
        self._postponed: BaseException | None = None

    def pytest_report_header(self) -> str:
        """Return a line with the number of ranks and the device."""
        return f"distcompat: inside a launch of {self._world.size} ranks, on {self._session.device}"

    # Collection.

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Store an error of collection, to compare it between ranks."""
        if report.failed:
            last_line = report.longreprtext.strip().splitlines()[-1]
            self._collection_errors.append(f"{report.nodeid}: {last_line}")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Compare the collected tests of all ranks; end the session if they differ."""
        self._pytest = session
        if session.config.option.collectonly:
            return
        self._lockstep = Lockstep(
            self._world.rank, self._world.size, self._termination, self._overrun
        )
        collection = {
            "items": [item.nodeid for item in session.items],
            "errors": self._collection_errors,
        }
        # The time limit for collecting, which other ranks may still be doing.
        limit = float(self._session.setting("warm_timeout").value)
        try:
            # How the collected tests differ between ranks, as text; empty if they do not.
            problem = differences(self._lockstep.exchange(collection, limit))
        except Gone as gone:
            problem = str(gone)
        # Rank 0 shows the error. The others end with the same exit status.
        if problem and self._world.rank == 0:
            raise pytest.UsageError(f"pytest inside a launch: {problem}")
        if problem:
            pytest.exit(
                f"pytest inside a launch: {problem}", returncode=pytest.ExitCode.USAGE_ERROR
            )

    # Tests.

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Begin the setup; skip tests that cannot run on these ranks."""
        self._begin(item, "setup")
        reason = self._unsupported_reason(item)
        if reason:
            pytest.skip(reason)
        # The directory of the fixture ``shared_dir``: rank 0 makes it, for all ranks.
        if "shared_dir" in getattr(item, "fixturenames", ()):
            assert self._lockstep is not None
            base = session_basetemp(item.config)
            path = self._lockstep.from_rank_zero(
                lambda: tempfile.mkdtemp(prefix="shared-", dir=base)
            )
            item.config.stash[SHARED] = Path(path)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None]:
        """Begin the call; on a rank whose setup raised an expected exception, raise it again."""
        self._begin(item, "call")
        if self._postponed is not None:
            raise self._postponed
        self._calling = True
        try:
            return (yield)
        finally:
            self._calling = False

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        """Begin the teardown."""
        self._begin(item, "teardown")

    def _begin(self, item: pytest.Item, when: Literal["setup", "call", "teardown"]) -> None:
        """Begin a phase of a test; the time limit counts from its setup on."""
        if when == "setup":
            self._item = item
            self._cut = False
            self._postponed = None
            self._limit = self._time_limit(item)
            self._deadline = clock.now() + self._limit
        self._when = when
        self._phases = Phases()
        # After a rank has ended or hung there is nobody to agree with.
        if self._lockstep is not None and not self._over:
            place = f"{when} of {item.nodeid}"
            self._lockstep.begin(place, self._deadline, self._limit)

    def _time_limit(self, item: pytest.Item) -> float:
        """Return the time limit of a test in seconds.

        It is that of its mark, or of the session, or of pytest-timeout if that is shorter.
        """
        mark = mark_of(item)
        limit = self._session.timeout
        if mark is not None and mark.timeout:
            limit = mark.timeout
        # The plugin has put pytest-timeout's limit of the item into its stash.
        return min(limit, item.stash.get(TIME_LIMIT, math.inf))

    def _unsupported_reason(self, item: pytest.Item) -> str:
        """Return why the test cannot run on these ranks; empty if it can."""
        for name, reason in _STARTING.items():
            if name in getattr(item, "fixturenames", ()):
                launcher = "torchrun" if "TORCHELASTIC_RUN_ID" in os.environ else "a launcher"
                return f"{reason} of its own: run pytest without {launcher}"
        world_size = _declared_world_size(item)
        if world_size is not None and world_size != self._world.size:
            return f"the test is for {world_size} ranks, this launch has {self._world.size}"
        return ""

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Change this rank's own report of a phase so that it shows the outcome of all ranks.

        This is where a rank waits for the others, at the end of each phase.
        """
        report = yield
        # Notes in the report whether its exception is due to a rank that is gone: later only the
        # exception's text is left.
        mark_exception(report, call, item.config.rootpath)
        if self._is_of_subtest(call):
            # Other ranks need not have the same subtests.
            return report
        self._pass_lost_fixture(report)
        lockstep = self._lockstep
        if lockstep is None or self._over:
            return report
        if not lockstep.in_phase:
            # Another plugin's hook has raised before our hook for this phase was called.
            self._begin(item, report.when)
        try:
            phase = self._phases.of(report)
            # This waits for the reports of all ranks.
            agreement = lockstep.end(phase, group=self._has_group(call.when))
        except Gone as problem:
            # Rank 0 does not answer any more.
            pytest.exit(str(problem), returncode=pytest.ExitCode.TESTS_FAILED)
        outcome = agreement.outcome
        self._cut = self._cut or agreement.cut
        # A setup in which some ranks raised an xfail, and others passed. These go on to the call,
        # and may still fail. The rest, some of which may have skipped, raise their exception there.
        if outcome.kind == POSTPONED and call.excinfo is not None:
            self._postponed = call.excinfo.value
        # The report now shows the outcome of all ranks.
        impose(report, outcome, self._command(item))
        # ``over``: a rank has ended, hangs, or runs another test.
        if agreement.over and self._pytest is not None:
            self._over = True
            self._pytest.shouldfail = _STOP_REASON
        self._apply_known_issues(item, report, outcome)
        return report

    def _pass_lost_fixture(self, report: pytest.TestReport) -> None:
        """Let a setup or teardown pass that failed only because another rank is gone.

        A fixture has waited for its peers in vain again. The report of the call has the cause.
        """
        # ``mark_exception`` has set the attribute ``LOST``.
        is_lost = report.when != "call" and report.failed and getattr(report, LOST, False)
        if is_lost and (self._over or self._cut):
            report.outcome = "passed"
            report.longrepr = None

    def _is_of_subtest(self, call: pytest.CallInfo[None]) -> bool:
        """Tell whether a report is for a subtest, in the test function or in a fixture."""
        if self._calling:
            return True
        # A subtest in a fixture has ``when="call"`` during a setup or teardown.
        in_phase = self._lockstep is not None and self._lockstep.in_phase
        return in_phase and call.when != self._when

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> Generator[None]:
        """Add a subtest to its phase, also on ranks that write no report."""
        # Only the report of a subtest has a name.
        if name_of(report):
            self._phases.of(report)
            if report.failed and not hasattr(report, "wasxfail") and self._pytest is not None:
                # pytest is about to count the subtest as a failed test, and with --maxfail this
                # rank would stop while others go on. So the count is lowered by one.
                self._pytest.testsfailed -= 1
        return (yield)

    def _has_group(self, when: str) -> bool:
        """Tell whether this rank has a process group at the end of a phase.

        Rank 0 clears the store of the launch once no rank has one. If the connections of a rank
        were closed in this test, the group is of no use any more. It is destroyed in the teardown,
        so that the next test can make a new one.

        Args:
            when: ``setup``, ``call`` or ``teardown``.
        """
        distributed: Any = sys.modules.get("torch.distributed")
        if distributed is None or not distributed.is_initialized():
            return False
        if when == "teardown" and self._cut:
            distributed.destroy_process_group()
            return False
        return True

    def _apply_known_issues(
        self, item: pytest.Item, report: pytest.TestReport, outcome: Outcome
    ) -> None:
        """Turn a failure of the call into an xfail if a known issue explains it.

        A known issue is a bug of a library. Here those count that the user has declared
        (``session.own``); none excuses a hard failure, which is a crash, a hang or a leak.
        """
        if report.when == "call" and self._session.own:
            apply_known_issues(item, report, hard=outcome.hard, outcome=outcome)

    def _command(self, item: pytest.Item) -> str:
        """Return the command that runs this test alone."""
        command = f"pytest {item.nodeid}"
        if isinstance(item, pytest.Function):
            command = self._session.reproduce(item)
        return f"torchrun --nproc-per-node {self._world.size} -m {command}"

    # The end.

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Set the exit status: a failure on all ranks if any rank has failed."""
        if self._lockstep is not None:
            session.exitstatus = self._lockstep.end_session(
                int(exitstatus), self._reason_to_leave(session)
            )

    def _reason_to_leave(self, session: pytest.Session) -> str:
        """Return why this rank ends the session before all tests have run; empty if it does not.

        For example ``stopping after 1 failures``. The reason that this module sets itself does not
        count: the other ranks have it too.
        """
        reason = self._exit or session.shouldfail or session.shouldstop
        if not reason or reason == _STOP_REASON:
            return ""
        return str(reason)

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Store the reason of ``pytest.exit``, or that Ctrl-C was pressed."""
        self._exit = excinfo.exconly(tryshort=True)

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        """Wait until rank 0 has written its reports.

        The launcher ends all ranks as soon as one exits with a failure, rank 0 included.
        """
        if self._lockstep is not None:
            self._lockstep.close()

    def _overrun(self, outcome: Outcome | None) -> None:
        """End this process, whose main thread hangs in a test.

        The thread of ``Lockstep`` that watches the phase calls it.

        Args:
            outcome: The outcome that rank 0 reports before; None if it is unknown.
        """
        item = self._item
        session = self._pytest
        try:
            if self._world.rank == 0 and outcome and item and session:
                self._report(item, session, outcome)
        finally:
            if self._lockstep is not None:
                self._lockstep.close()
            sys.stdout.flush()
            os._exit(pytest.ExitCode.TESTS_FAILED)

    def _report(self, item: pytest.Item, session: pytest.Session, outcome: Outcome) -> None:
        """Report the outcome of a test that will not return, and finish pytest's session."""
        capture = item.config.pluginmanager.getplugin("capturemanager")
        if capture is not None:
            capture.suspend_global_capture(in_=True)
        report = pytest.TestReport(
            item.nodeid, item.location, dict.fromkeys(item.keywords, 1), "passed", None, self._when
        )
        report.user_properties = item.user_properties
        impose(report, outcome, self._command(item))
        self._apply_known_issues(item, report, outcome)
        session.shouldfail = _STOP_REASON
        item.config.hook.pytest_runtest_logreport(report=report)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        item.config.hook.pytest_sessionfinish(session=session, exitstatus=session.exitstatus)


def _declared_world_size(item: pytest.Item) -> int | None:
    """Return the number of ranks that a test says it is for; None if it says none."""
    cell = cell_of(item)
    if cell:
        return cell.world_size
    mark = mark_of(item)
    if mark:
        return mark.world_size
    return None
