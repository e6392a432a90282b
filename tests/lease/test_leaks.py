"""Memory that stays in use on a GPU after the ranks are gone is a failure of the test whose ranks they were."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.launchers import WithoutProcesses

from pytest_distcompat.ext.reuse.keeper import RankKeeper
from pytest_distcompat.ext.reuse.reused_ranks import Reuse
from pytest_distcompat.launch.forensics.ending import Ending, RankEnd
from pytest_distcompat.launch.forensics.watchdog import Watchdog
from pytest_distcompat.launch.launcher import OpenRun, Replies
from pytest_distcompat.launch.request import Request
from pytest_distcompat.lease import Inventory, Leak, Pool
from pytest_distcompat.leased import LeasedLauncher, leak_message

if TYPE_CHECKING:
    from tests.lease.conftest import MadeUpMemory, RunOnGpus

MARKED = """
import pytest

@pytest.mark.distcompat(world_size=2)
def test_before(): pass

@pytest.mark.distcompat(world_size=2)
def test_leaky(): pass

@pytest.mark.distcompat(world_size=2)
def test_after(): pass
"""
SUITE = """
from pytest_distcompat import CompatSuite, Matrix, fails

class TestX(CompatSuite):
    driver = "torch"
    matrix = Matrix(strategies=("ddp",), precisions=("fp32",), world_sizes=(2,))
    expect = (fails("names", reason="declared"), fails("active", reason="declared"))
"""


def test_the_marked_test_that_leaked_fails_and_no_other(pytester: pytest.Pytester, run_on_gpus: RunOnGpus) -> None:
    pytester.makepyfile(test_it=MARKED)
    result = run_on_gpus(script={"test_leaky": {"leaks": 300}})
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(
        [
            "*_ test_leaky _*",
            "300 MiB stayed in use on GPU-0 after the ranks were gone",
            "reproduce: pytest test_it.py::test_leaky*",
            "FAILED test_it.py::test_leaky - 300 MiB stayed in use on GPU-0 *",
        ]
    )


def test_memory_of_the_gpu_driver_is_no_leak(pytester: pytest.Pytester, run_on_gpus: RunOnGpus) -> None:
    pytester.makepyfile(test_it=MARKED)
    run_on_gpus(script={"test_leaky": {"leaks": 60}}).assert_outcomes(passed=3)


@pytest.mark.nightly
def test_an_xfail_mark_does_not_excuse_a_leak(pytester: pytest.Pytester, run_on_gpus: RunOnGpus) -> None:
    pytester.makepyfile(test_it=MARKED.replace("def test_leaky", "@pytest.mark.xfail\ndef test_leaky"))
    result = run_on_gpus(script={"test_leaky": {"leaks": 300}})
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(["300 MiB stayed in use on GPU-0 after the ranks were gone"])


def test_a_run_of_a_suite_that_leaked_is_a_failure_that_nothing_declared_excuses(
    pytester: pytest.Pytester, run_on_gpus: RunOnGpus
) -> None:
    pytester.makepyfile(test_it=SUITE)
    names, active = (f"test[ddp-fp32-w2:{check}]" for check in ("names", "active"))
    # Whichever is first runs the run that both need.
    script = {name: {"leaks": 512} for name in (names, active)}
    result = run_on_gpus("-k", "names or active", "-vv", script=script)
    assert result.parseoutcomes()["failed"] == 2
    for check in ("names", "active"):
        result.stdout.fnmatch_lines(
            [
                "512 MiB stayed in use on GPU-0 after the ranks were gone",
                f"ddp-fp32-w2: {check}: leaked",
                f"reproduce: pytest 'test_it.py::TestX::test[[]ddp-fp32-w2:{check}[]]'*",
            ]
        )
    # The same ranks leave nothing: what they did not do either is declared.
    assert run_on_gpus("-k", "names or active").parseoutcomes()["xfailed"] == 2


LENT = """
import os, pytest, stand_in, sys

def leave(size):
    stand_in.used[stand_in.first_visible(os.environ)] += size << 20

@pytest.mark.require_distributed(2)
def test_before(): leave(60)

@pytest.mark.require_distributed(2)
def test_leaky(): leave(300)

@pytest.fixture
def gives_back():
    leave(300)
    yield
    leave(-300)

@pytest.mark.require_distributed(2)
def test_after(gives_back): pass
"""


@pytest.mark.nightly
def test_the_test_that_starts_its_ranks_itself_fails_too(pytester: pytest.Pytester, run_on_gpus: RunOnGpus) -> None:
    pytester.makeconftest('pytest_plugins = ["pytest_distcompat.aliases"]')
    for mark in ("", "@pytest.mark.xfail\n"):
        pytester.makepyfile(test_it=LENT.replace("def test_leaky", f"{mark}def test_leaky"))
        result = run_on_gpus()
        if mark:
            result.assert_outcomes(errors=1, passed=2, xpassed=1)
        else:
            result.assert_outcomes(errors=1, passed=3)
        result.stdout.fnmatch_lines(
            [
                "*_ ERROR at teardown of test_leaky _*",
                "300 MiB stayed in use on GPU-0 after the ranks were gone",
                "reproduce: pytest test_it.py::test_leaky*",
                "ERROR test_it.py::test_leaky - 300 MiB stayed in use on GPU-0 *",
            ]
        )


@pytest.mark.nightly
def test_a_leak_is_reported_beside_another_failure(pytester: pytest.Pytester, run_on_gpus: RunOnGpus) -> None:
    pytester.makeconftest('pytest_plugins = ["pytest_distcompat.aliases"]')
    pytester.makepyfile(test_it=LENT.replace("    leave(-300)", "    raise OSError('on the way down')"))
    result = run_on_gpus("-k", "after")
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["E *OSError: on the way down", "300 MiB stayed in use on GPU-0 after the ranks *"])


@pytest.mark.nightly
def test_memory_that_may_be_pytests_own_is_a_notice_only(pytester: pytest.Pytester, run_on_gpus: RunOnGpus) -> None:
    pytester.makeconftest(
        """
        import sys
        from types import SimpleNamespace
        sys.modules["torch"] = SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: True))
        pytest_plugins = ["pytest_distcompat.aliases"]
        """
    )
    pytester.makepyfile(test_it=LENT)
    result = run_on_gpus()
    result.assert_outcomes(passed=3, warnings=1)
    result.stdout.fnmatch_lines(
        ["*test_leaky: 300 MiB stayed in use on GPU-0 *which may be pytest's own process: it uses a GPU too"]
    )


@pytest.mark.nightly
def test_memory_of_a_dead_rank_is_not_charged_to_the_next_lease(
    pytester: pytest.Pytester, run_on_gpus: RunOnGpus
) -> None:
    pytester.makeconftest(
        """
        from pytest_distcompat.lease import Holder, pool
        # The stand-in has 1024 MiB in use.
        dead = Holder("GPU-0", "test_killed", 0, 0.0, before=724 << 20)
        pool.Pool._read_record = lambda self, name: dead if name == "GPU-0" else None
        pytest_plugins = ["pytest_distcompat.aliases"]
        """
    )
    pytester.makepyfile(test_it=LENT)
    result = run_on_gpus("-k", "before")
    result.assert_outcomes(passed=1, warnings=1, deselected=2)
    result.stdout.fnmatch_lines(["*test_killed, whose process died: 300 MiB stayed in use on GPU-0 after the ranks *"])


SCRIPTS = """
import stand_in
from pytest_distcompat.launch.forensics.ending import Ending, RankEnd
from pytest_distcompat.launch.hosting import Hosted

def run(hosted):
    stand_in.used[stand_in.first_visible(hosted.environment)] += 300 << 20
    return Ending((RankEnd(0, "done"), RankEnd(1, "done")), {}, command="torchrun train.py")

Hosted.run = run
"""


@pytest.mark.nightly
@pytest.mark.parametrize("mark", ["", "@pytest.mark.xfail\n"])
def test_a_script_that_leaves_memory_in_use_fails(mark: str, pytester: pytest.Pytester, run_on_gpus: RunOnGpus) -> None:
    pytester.makeconftest(SCRIPTS)
    pytester.makepyfile(
        train="", test_it=f"import pytest\n{mark}def test_it(distcompat): distcompat.launch('train.py', world_size=2)"
    )
    result = run_on_gpus()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["E *RunFailedError: 300 MiB stayed in use on GPU-0 after the ranks were gone*"])


LEAKS = (Leak("GPU-0", 300 << 20, "test"), Leak("GPU-1", 100 << 20, "test"))
WORDS = [
    f"{size} MiB stayed in use on {name} after the ranks were gone" for size, name in ((300, "GPU-0"), (100, "GPU-1"))
]


def leaky(*ranks: RankEnd) -> Ending:
    return Ending(ranks, {end.rank: [] for end in ranks}, leaks=tuple(map(leak_message, LEAKS)))


def test_the_leak_is_the_failure_of_ranks_that_ended_well() -> None:
    ending = leaky(RankEnd(0, "done"), RankEnd(1, "done"))
    assert (ending.failed, ending.kind) == (True, "leaked")
    assert ending.headline() == "; ".join(WORDS)
    assert ending.text() == "\n\n".join(WORDS)


@pytest.mark.parametrize(("status", "kind"), [("raised", "leaked"), ("killed", "crashed")])
def test_a_failed_rank_is_shown_before_the_leak_and_a_crash_stays_a_crash(status: str, kind: str) -> None:
    ranks = (RankEnd(0, "done"), RankEnd(1, status, "said why", time=1.0))
    ending, without = leaky(*ranks), Ending(ranks, {0: [], 1: []})
    assert (ending.failed, ending.kind) == (True, kind)
    assert ending.headline() == without.headline() == "rank 1 said why"
    assert ending.text() == "\n\n".join([without.text(), *WORDS])


@dataclass
class MadeUpRun(OpenRun):
    """Ranks that do each request at once, and leak when they are gone."""

    start_request: Request
    memory: MadeUpMemory
    leaves: int
    open: bool = True

    def __post_init__(self) -> None:
        # Nobody connects.
        self.listener, self.peer = socket.socketpair()

    def adapted(self, request: Request) -> Request:
        return request

    def wait(self, watch: Watchdog, replies: Replies | None = None) -> None:
        return None

    def ending(self, watch: Watchdog, *, notice: str = "") -> Ending:
        return Ending((RankEnd(0, "done"),), {0: []})

    def conclude(self, watch: Watchdog, answer: Mapping[str, Any] | None) -> Ending:
        self.memory.now["GPU-a"] += self.leaves
        return self.ending(watch)


@dataclass
class OpensRuns(WithoutProcesses):
    """Stands for a launcher whose ranks are kept."""

    memory: MadeUpMemory
    leaves: int
    can_open = True

    def run(self, request: Request) -> Ending:
        raise NotImplementedError

    def open(self, request: Request, target: str) -> OpenRun:
        return MadeUpRun(request, self.memory, self.leaves)


def test_a_leak_of_shared_ranks_is_charged_to_their_last_test(memory: MadeUpMemory, tmp_path: Path) -> None:
    pool = Pool(tmp_path / "leases", Inventory("gpu", ("GPU-a",)), memory=memory, free_timeout=0)
    notices: list[str] = []
    launcher = LeasedLauncher(OpensRuns(memory, 300 << 20), lambda: pool, notices.append)
    keeper = RankKeeper(launcher, notices.append)
    request = Request("", {}, 1, str(tmp_path / "run"))
    assert not keeper.run(request, Reuse("module", 10, last=False)).failed
    assert [holder.id for holder in pool.holders()] == ["GPU-a"]
    last = keeper.run(request, Reuse("module", 10, last=True))
    assert last.headline() == "300 MiB stayed in use on GPU-a after the ranks were gone"
    assert not pool.holders()
    assert not notices


def test_a_leak_of_shared_ranks_at_the_end_of_the_session_is_reported(memory: MadeUpMemory, tmp_path: Path) -> None:
    pool = Pool(tmp_path / "leases", Inventory("gpu", ("GPU-a",)), memory=memory, free_timeout=0)
    notices: list[str] = []
    launcher = LeasedLauncher(OpensRuns(memory, 300 << 20), lambda: pool, notices.append)
    keeper = RankKeeper(launcher, notices.append)
    keeper.run(Request("", {}, 1, str(tmp_path / "run")), Reuse("module", 10, last=False))
    keeper.retire()
    nodeid = os.environ["PYTEST_CURRENT_TEST"].partition(" ")[0]
    left = "300 MiB stayed in use on GPU-a after the ranks were gone"
    assert notices == [f"ranks that {nodeid} and later tests shared: {left}"]
    assert not pool.holders()
