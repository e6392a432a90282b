"""pytest inside an external launch: ``torchrun --nproc-per-node 2 -m pytest``. All ranks run all tests; rank 0 reports.

Fixtures such as ``rank`` and ``world`` work as on ranks that the plugin starts. Tests that start ranks themselves (suites,
scripts) are skipped.
"""

from __future__ import annotations

import difflib
import math
import os
import sys
import tempfile
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any, Literal

import pytest

from pytest_distcompat import clock
from pytest_distcompat.ext.inside.agreement import POSTPONED, impose
from pytest_distcompat.ext.inside.lockstep import Gone, Lockstep
from pytest_distcompat.ext.inside.termination import Termination
from pytest_distcompat.plugin.current import session_of
from pytest_distcompat.plugin.declared import apply_known_issues, declared_of
from pytest_distcompat.plugin.marked.declare import cell_of, mark_of
from pytest_distcompat.plugin.marked.outcome import Outcome
from pytest_distcompat.plugin.marked.phase import LOST, Phases, mark_exception, name_of
from pytest_distcompat.plugin.marked.run import TIME_LIMIT
from pytest_distcompat.plugin.on_ranks import launched
from pytest_distcompat.plugin.on_ranks.launched import COLLECTS, ON_RANK, SHARED, WORLD
from pytest_distcompat.plugin.on_ranks.rank_session import OF_RANK_ZERO
from pytest_distcompat.plugin.session import DistcompatSession, session_basetemp
from pytest_distcompat.world import World

#: Fixtures that start ranks, and the reason to skip their tests.
_STARTING = {
    "distcompat_case": "a suite starts ranks",
    "distcompat": "the fixture distcompat starts ranks",
    "distcompat_lent": "the test starts ranks",
}
#: The reason for which a session ends before all its tests have run.
_STOP_REASON = "a rank of the launch has ended, or hangs: there is nothing to go on with"
#: The number of differences that a message shows.
_DIFFERENCES_SHOWN = 5


def enter(config: pytest.Config) -> None:
    """Set this pytest up as a rank of the launch. Raises pytest.UsageError under xdist."""
    config.stash[ON_RANK] = config.stash[COLLECTS] = True
    session = session_of(config)
    launched.hide_from_children()
    if getattr(config.option, "dist", "no") != "no" or hasattr(config, "workerinput"):
        raise pytest.UsageError(
            "pytest inside a launch: its ranks cannot share tests out with xdist; leave out -n and --dist"
        )
    world = World.from_environment(session.device)
    session.world_size = world.size
    config.stash[WORLD] = world
    if world.rank:
        for name, value in OF_RANK_ZERO.items():
            if hasattr(config.option, name):
                setattr(config.option, name, value)
        if config.option.basetemp:
            # pytest empties the directory: each rank needs its own.
            config.option.basetemp = f"{config.option.basetemp}-rank{world.rank}"
    config.pluginmanager.register(Inside(session, world), "distcompat-inside-rank")
    config.pluginmanager.register(declared_of(session), "distcompat-declared")


class Inside:
    """Hooks of one rank of an external launch."""

    def __init__(self, session: DistcompatSession, world: World) -> None:
        self._session, self._world = session, world
        self._termination = Termination()
        self._lockstep: Lockstep | None = None
        self._pytest: pytest.Session | None = None
        self._collection_errors: list[str] = []
        self._cut = self._over = False
        self._item: pytest.Item | None = None
        self._postponed: BaseException | None = None
        self._limit = self._deadline = 0.0
        self._when: Literal["setup", "call", "teardown"] = "setup"
        self._phases, self._calling = Phases(), False
        #: The exception that ends the session on this rank; empty without one.
        self._exit = ""

    def pytest_report_header(self) -> str:
        """Return a line with the number of ranks and the device."""
        return f"distcompat: inside a launch of {self._world.size} ranks, on {self._session.device}"

    # Collection.

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note an error of collection."""
        if report.failed:
            self._collection_errors.append(
                f"{report.nodeid}: {report.longreprtext.strip().splitlines()[-1]}"
            )

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Compare the tests of all ranks; end the session if they differ."""
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
        limit = float(self._session.setting("warm_timeout").value)
        try:
            problem = differences(self._lockstep.exchange(collection, limit))
        except Gone as gone:
            problem = str(gone)
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
        if "shared_dir" in getattr(item, "fixturenames", ()):
            assert self._lockstep is not None
            base = session_basetemp(item.config)
            path = self._lockstep.from_rank_zero(
                lambda: tempfile.mkdtemp(prefix="shared-", dir=base)
            )
            item.config.stash[SHARED] = Path(path)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None]:
        """Begin the call."""
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
        if when == "setup":
            mark = mark_of(item)
            limit = min(
                (mark.timeout if mark else None) or self._session.timeout,
                item.stash.get(TIME_LIMIT, math.inf),
            )
            self._item, self._cut, self._postponed = item, False, None
            self._limit, self._deadline = limit, clock.now() + limit
        self._when, self._phases = when, Phases()
        # After a hang there are no other ranks to agree with.
        if self._lockstep is not None and not self._over:
            self._lockstep.begin(f"{when} of {item.nodeid}", self._deadline, self._limit)

    def _unsupported_reason(self, item: pytest.Item) -> str:
        """Return why the test cannot run on these ranks; empty if it can."""
        starting = [
            reason
            for name, reason in _STARTING.items()
            if name in getattr(item, "fixturenames", ())
        ]
        if starting:
            launcher = "torchrun" if "TORCHELASTIC_RUN_ID" in os.environ else "a launcher"
            return f"{starting[0]} of its own: run pytest without {launcher}"
        mark, cell = mark_of(item), cell_of(item)
        world_size = cell.world_size if cell else mark.world_size if mark else None
        if world_size is not None and world_size != self._world.size:
            return f"the test is for {world_size} ranks, this launch has {self._world.size}"
        return ""

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Replace this rank's own report by that of all ranks."""
        report = yield
        mark_exception(report, call, item.config.rootpath)
        lockstep = self._lockstep
        if self._calling or (
            lockstep is not None and lockstep.in_phase and call.when != self._when
        ):
            # A report of a subtest, which other ranks need not have: during the call, or, with when="call", during a fixture.
            return report
        if (
            (self._over or self._cut)
            and call.when != "call"
            and report.failed
            and getattr(report, LOST, False)
        ):
            # A fixture that waits for its peers once more: the report of the call has the cause already.
            report.outcome, report.longrepr = "passed", None
        if lockstep is None or self._over:
            return report
        if not lockstep.in_phase:
            # Another plugin's hook raised before the hook here was called.
            self._begin(item, report.when)
        try:
            outcome, cut, over = lockstep.end(
                self._phases.of(report), group=self._has_group(call.when)
            )
        except Gone as problem:
            pytest.exit(str(problem), returncode=pytest.ExitCode.TESTS_FAILED)
        self._cut = self._cut or cut
        if outcome.kind == POSTPONED and call.excinfo is not None:
            self._postponed = call.excinfo.value
        impose(report, outcome, self._command(item))
        if over and self._pytest is not None:
            self._over = True
            self._pytest.shouldfail = _STOP_REASON
        self._apply_known_issues(item, report, outcome)
        return report

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> Generator[None]:
        """Count a subtest in its phase; ranks without a terminal plugin need that too."""
        if name_of(report):
            self._phases.of(report)
            if report.failed and not hasattr(report, "wasxfail") and self._pytest is not None:
                # pytest is about to count it as a failure. With --maxfail this rank would stop while others go on.
                self._pytest.testsfailed -= 1
        return (yield)

    def _has_group(self, when: str) -> bool:
        """Tell whether this rank has a process group. In a teardown, destroy one whose connections were cut."""
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
        if report.when == "call" and self._session.own:
            apply_known_issues(item, report, hard=outcome.hard, outcome=outcome)

    def _command(self, item: pytest.Item) -> str:
        command = (
            self._session.reproduce(item)
            if isinstance(item, pytest.Function)
            else f"pytest {item.nodeid}"
        )
        return f"torchrun --nproc-per-node {self._world.size} -m {command}"

    # The end.

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Give every rank an exit code that is no better than any other's."""
        if self._lockstep is not None:
            session.exitstatus = self._lockstep.end_session(
                int(exitstatus), self._reason_to_leave(session)
            )

    def _reason_to_leave(self, session: pytest.Session) -> str:
        """Return what ended the session on this rank before all its tests had run; empty if nothing did."""
        asked = self._exit or session.shouldfail or session.shouldstop
        return "" if not asked or asked == _STOP_REASON else str(asked)

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Note what ``pytest.exit`` says, or that Ctrl-C was pressed."""
        self._exit = excinfo.exconly(tryshort=True)

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        """Wait until rank 0 has reported: the launcher ends all ranks as soon as one exits with a failure."""
        if self._lockstep is not None:
            self._lockstep.close()

    def _overrun(self, outcome: Outcome | None) -> None:
        """End this process, whose main thread will not return; rank 0 reports the outcome first. Runs in a thread."""
        item, session = self._item, self._pytest
        try:
            if (
                self._world.rank == 0
                and outcome is not None
                and item is not None
                and session is not None
            ):
                self._report(item, session, outcome)
        finally:
            if self._lockstep is not None:
                self._lockstep.close()
            sys.stdout.flush()
            os._exit(pytest.ExitCode.TESTS_FAILED)

    def _report(self, item: pytest.Item, session: pytest.Session, outcome: Outcome) -> None:
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


def differences(collections: Mapping[int, Mapping[str, list[str]]]) -> str:
    """Return how node ids (``items``) and ``errors`` of collection differ between ranks; empty if they do not."""
    first = collections[0]
    for rank, other in collections.items():
        if other["errors"] != first["errors"]:
            own, others = (next(iter(each["errors"]), "none") for each in (first, other))
            return f"not all ranks have the same errors of collection. rank 0: {own}; rank {rank}: {others}"
        if other["items"] == first["items"]:
            continue
        lines = [
            f"  only rank {0 if line[0] == '-' else rank}: {line[1:]}"
            for line in difflib.unified_diff(
                sorted(first["items"]), sorted(other["items"]), lineterm="", n=0
            )
            if line[0] in "-+" and line[:3] not in {"---", "+++"}
        ]
        if not lines:
            index = next(
                n
                for n, (a, b) in enumerate(zip(first["items"], other["items"], strict=True))
                if a != b
            )
            pair = f"rank 0 has {first['items'][index]}, rank {rank} has {other['items'][index]}"
            return f"the ranks have their tests in different orders: as number {index + 1} {pair}"
        more = (
            [f"  and {len(lines) - _DIFFERENCES_SHOWN} more"]
            if len(lines) > _DIFFERENCES_SHOWN
            else []
        )
        return "\n".join(
            ["the ranks have collected different tests:", *lines[:_DIFFERENCES_SHOWN], *more]
        )
    return ""
