"""pytest inside somebody's launch: ``torchrun --nproc-per-node 2 -m pytest``. All ranks run all tests; rank 0 tells.

The fixtures of ranks say where each rank stands, as on ranks of our own. What starts ranks itself (suites, scripts) is skipped.
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
from pytest_distcompat.plugin.current import session_of
from pytest_distcompat.plugin.declared import declared_of, weigh
from pytest_distcompat.plugin.inside import launched
from pytest_distcompat.plugin.inside.agreement import impose
from pytest_distcompat.plugin.inside.lockstep import Gone, Lockstep
from pytest_distcompat.plugin.inside.rank_session import OF_RANK_ZERO, ON_RANK, SHARED, WORLD
from pytest_distcompat.plugin.inside.termination import Termination
from pytest_distcompat.plugin.marked.marker import TIME_LIMIT, cell_of, mark_of
from pytest_distcompat.plugin.marked.outcome import LOST, Outcome, Phases, mark_lost_peer
from pytest_distcompat.plugin.marked.subtests import name_of
from pytest_distcompat.plugin.session import DistcompatSession, session_basetemp
from pytest_distcompat.world import World

#: Fixtures that start ranks.
_STARTING = {
    "distcompat_case": "a suite starts ranks",
    "distcompat": "the fixture distcompat starts ranks",
    "distcompat_lent": "the test starts ranks",
}
#: Why a session ends before all its tests have run.
_OVER = "a rank of the launch has ended, or hangs: there is nothing to go on with"
#: Differences that a message shows.
_SHOWN = 5


def enter(config: pytest.Config) -> None:
    """Make this pytest a rank of the launch. Raises pytest.UsageError where it cannot be one."""
    config.stash[ON_RANK] = True
    session = session_of(config)
    launched.hide()
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
            # pytest empties it.
            config.option.basetemp = f"{config.option.basetemp}-rank{world.rank}"
    config.pluginmanager.register(Inside(session, world), "distcompat-inside")
    config.pluginmanager.register(declared_of(session), "distcompat-declared")


class Inside:
    """Hooks of one rank."""

    def __init__(self, session: DistcompatSession, world: World) -> None:
        self._session, self._world = session, world
        self._termination = Termination()
        self._lockstep: Lockstep | None = None
        self._pytest: pytest.Session | None = None
        self._broken: list[str] = []
        self._cut = self._over = False
        self._item: pytest.Item | None = None
        self._limit = self._deadline = 0.0
        self._when: Literal["setup", "call", "teardown"] = "setup"
        self._phases, self._calling = Phases(), False

    def pytest_report_header(self) -> str:
        """Where we are."""
        return f"distcompat: inside a launch of {self._world.size} ranks, on {self._session.device}"

    # Collection.

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Remember what could not be collected."""
        if report.failed:
            self._broken.append(f"{report.nodeid}: {report.longreprtext.strip().splitlines()[-1]}")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """All ranks have the same tests, or none runs any."""
        self._pytest = session
        if session.config.option.collectonly:
            return
        self._lockstep = Lockstep(self._world.rank, self._world.size, self._termination, self._overrun)
        about = {"items": [item.nodeid for item in session.items], "broken": self._broken}
        limit = float(self._session.setting("warm_timeout").value)
        try:
            problem = differences(self._lockstep.meet(about, limit))
        except Gone as gone:
            problem = str(gone)
        if problem:
            self._stop(f"pytest inside a launch: {problem}")

    def _stop(self, problem: str) -> None:
        if self._world.rank == 0:
            raise pytest.UsageError(problem)
        pytest.exit(problem, returncode=pytest.ExitCode.USAGE_ERROR)

    # Tests.

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """The first phase; also of an item that is run again."""
        self._begin(item, "setup")
        reason = self._unfit(item)
        if reason:
            pytest.skip(reason)
        if "shared_dir" in getattr(item, "fixturenames", ()):
            item.config.stash[SHARED] = self._shared(item.config)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None]:
        """The second phase."""
        self._begin(item, "call")
        self._calling = True
        try:
            return (yield)
        finally:
            self._calling = False

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        """The last phase."""
        self._begin(item, "teardown")

    def _begin(self, item: pytest.Item, when: Literal["setup", "call", "teardown"]) -> None:
        if when == "setup":
            mark = mark_of(item)
            limit = min((mark.timeout if mark else None) or self._session.timeout, item.stash.get(TIME_LIMIT, math.inf))
            self._item, self._cut = item, False
            self._limit, self._deadline = limit, clock.now() + limit
        self._when, self._phases = when, Phases()
        # After a hang nobody is there to be in step with, nor any time left.
        if self._lockstep is not None and not self._over:
            self._lockstep.begin(f"{when} of {item.nodeid}", self._deadline, self._limit)

    def _unfit(self, item: pytest.Item) -> str:
        """Why these ranks are not for that test, empty if they are."""
        starting = [why for name, why in _STARTING.items() if name in getattr(item, "fixturenames", ())]
        if starting:
            return f"{starting[0]} of its own: run pytest without {self._launcher}"
        mark, cell = mark_of(item), cell_of(item)
        wanted = cell.world_size if cell else mark.world_size if mark else None
        if wanted is not None and wanted != self._world.size:
            return f"the test is for {wanted} ranks, this launch has {self._world.size}"
        return ""

    @property
    def _launcher(self) -> str:
        return "torchrun" if "TORCHELASTIC_RUN_ID" in os.environ else "a launcher"

    def _shared(self, config: pytest.Config) -> Path:
        """A directory that the ranks of this machine share."""
        assert self._lockstep is not None
        return Path(self._lockstep.told(lambda: tempfile.mkdtemp(prefix="shared-", dir=session_basetemp(config))))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """The report of all ranks, in place of this rank's own."""
        report = yield
        mark_lost_peer(report, call)
        lockstep = self._lockstep
        if self._calling or (lockstep is not None and lockstep.within and call.when != self._when):
            # Of a subtest, which other ranks need not have: in the middle of the call, or (theirs is "call") of a fixture.
            return report
        if (self._over or self._cut) and call.when != "call" and report.failed and getattr(report, LOST, False):
            # A fixture that asks for the peers once more: what the call came to says it all.
            report.outcome, report.longrepr = "passed", None
        if lockstep is None or self._over:
            return report
        if not lockstep.within:
            # Another plugin's hook raised before ours was called.
            self._begin(item, report.when)
        try:
            outcome, cut, over = lockstep.end(self._phases.of(report).to_json(), group=self._has_group(call.when))
        except Gone as problem:
            pytest.exit(str(problem), returncode=pytest.ExitCode.TESTS_FAILED)
        self._cut = self._cut or cut
        impose(report, outcome, self._command(item))
        if over and self._pytest is not None:
            self._over = True
            self._pytest.shouldfail = _OVER
        self._weigh(item, report, outcome)
        return report

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> Generator[None]:
        """Have a subtest counted in its phase, on this rank too if no terminal does so."""
        if name_of(report):
            self._phases.of(report)
            if report.failed and not hasattr(report, "wasxfail") and self._pytest is not None:
                # pytest is about to count it, by --maxfail too, with which this rank would stop while others go on.
                self._pytest.testsfailed -= 1
        return (yield)

    def _has_group(self, when: str) -> bool:
        """Whether this rank has a process group; at the end of an item none whose connections were cut."""
        distributed: Any = sys.modules.get("torch.distributed")
        if distributed is None or not distributed.is_initialized():
            return False
        if when == "teardown" and self._cut:
            distributed.destroy_process_group()
            return False
        return True

    def _weigh(self, item: pytest.Item, report: pytest.TestReport, outcome: Outcome) -> None:
        if report.when == "call" and self._session.own:
            weigh(item, report, hard=outcome.hard, outcome=outcome)

    def _command(self, item: pytest.Item) -> str:
        command = self._session.reproduce(item) if isinstance(item, pytest.Function) else f"pytest {item.nodeid}"
        return f"torchrun --nproc-per-node {self._world.size} -m {command}"

    # The end.

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """The exit code of every rank is no better than any other's."""
        if self._lockstep is not None:
            session.exitstatus = self._lockstep.leave(int(exitstatus))

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        """The launcher ends all ranks when one has failed: rank 0 is to have told everything by then."""
        if self._lockstep is not None:
            self._lockstep.close()

    def _overrun(self, outcome: Outcome | None) -> None:
        """In the watcher's thread: this rank's main thread will not come back. Rank 0 tells what it knows first."""
        item, session = self._item, self._pytest
        try:
            if self._world.rank == 0 and outcome is not None and item is not None and session is not None:
                self._tell(item, session, outcome)
        finally:
            if self._lockstep is not None:
                self._lockstep.close()
            sys.stdout.flush()
            os._exit(pytest.ExitCode.TESTS_FAILED)

    def _tell(self, item: pytest.Item, session: pytest.Session, outcome: Outcome) -> None:
        capture = item.config.pluginmanager.getplugin("capturemanager")
        if capture is not None:
            capture.suspend_global_capture(in_=True)
        report = pytest.TestReport(
            item.nodeid,
            item.location,
            dict.fromkeys(item.keywords, 1),
            "passed",
            None,
            self._when,
            user_properties=item.user_properties,
        )
        impose(report, outcome, self._command(item))
        self._weigh(item, report, outcome)
        session.shouldfail = _OVER
        item.config.hook.pytest_runtest_logreport(report=report)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        item.config.hook.pytest_sessionfinish(session=session, exitstatus=session.exitstatus)


def differences(found: Mapping[int, Mapping[str, list[str]]]) -> str:
    """What the ranks did not collect alike, empty if nothing."""
    first = found[0]
    for rank, about in found.items():
        if about["broken"] != first["broken"]:
            told = "; ".join(
                f"rank {r}: {one['broken'][0] if one['broken'] else 'none'}" for r, one in ((0, first), (rank, about))
            )
            return f"not all ranks have the same errors of collection. {told}"
        if about["items"] == first["items"]:
            continue
        lines = [
            f"  only rank {0 if line[0] == '-' else rank}: {line[1:]}"
            for line in difflib.unified_diff(sorted(first["items"]), sorted(about["items"]), lineterm="", n=0)
            if line[0] in "-+" and line[:3] not in {"---", "+++"}
        ]
        if not lines:
            place = next(n for n, (a, b) in enumerate(zip(first["items"], about["items"], strict=True)) if a != b)
            pair = f"rank 0 has {first['items'][place]}, rank {rank} has {about['items'][place]}"
            return f"the ranks have their tests in different orders: as number {place + 1} {pair}"
        more = [f"  and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
        return "\n".join(["the ranks have collected different tests:", *lines[:_SHOWN], *more])
    return ""
