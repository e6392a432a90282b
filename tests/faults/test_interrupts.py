"""Whatever ends pytest in mid-test, its ranks end with it; and other plugins and options that end or time tests."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING

import pytest
from tests.pytest_runs import temporaries

from pytest_distcompat.launch.temporary import remove_abandoned
from pytest_distcompat.lease import default_directory
from pytest_distcompat.report.document import Report

if TYPE_CHECKING:
    from pathlib import Path

    from tests.faults.conftest import Faulty, Start

pytestmark = pytest.mark.spawn

KILLS_ITS_WORKER = """
import os
import signal
import time
import psutil
import pytest

mark = pytest.mark.distcompat(world_size=2)

@mark
def test_well(process_group):
    process_group.barrier().wait()

@mark
def test_worker_dies(rank, process_group):
    if rank == 1:
        # The fork servers of the session and of libraries, the launcher process, the worker.
        os.kill(psutil.Process().parents()[3].pid, signal.SIGKILL)
    time.sleep(600)

def test_worker_exits():
    os._exit(1)

@mark
@pytest.mark.parametrize("number", range(3))
def test_next(process_group, number):
    process_group.barrier().wait()
"""
FAILING = """
import time
import pytest

pytestmark = pytest.mark.distcompat(world_size=2)

@pytest.mark.parametrize("number", range(4))
def test_fails(rank, process_group, number):
    if rank == 1:
        raise ValueError(number)
    process_group.barrier().wait()
"""
MANY_FAILING = FAILING.replace("range(4)", "range(20)")
REUSE = "--distcompat-reuse=session"
SLOW = """
import time
import pytest

@pytest.mark.distcompat(world_size=2)
def test_slow(rank, process_group):
    time.sleep(1.5)

@pytest.mark.distcompat(world_size=2, timeout=3)
def test_hangs(rank, process_group):
    time.sleep(600 * rank)
    process_group.barrier().wait()

@pytest.mark.timeout(2)
@pytest.mark.distcompat(world_size=2)
def test_hangs_too(rank, process_group):
    if rank == 1:
        while True:
            pass
"""


@pytest.fixture
def busy(start: Start) -> Faulty:
    """A pytest whose two ranks are in the middle of a test."""
    faulty = start("faults_midway.py")
    faulty.wait_for("busy-0", "busy-1")
    return faulty


def test_ctrl_c(busy: Faulty) -> None:
    busy.process.send_signal(signal.SIGINT)
    run = busy.finish(30)
    assert run.code == pytest.ExitCode.INTERRUPTED
    assert "KeyboardInterrupt" in run.out
    assert "test_next" not in run.outcomes
    assert not run.leftovers


@pytest.mark.nightly
@pytest.mark.parametrize("pause", [0.0, 0.05])
def test_ctrl_c_twice(busy: Faulty, pause: float) -> None:
    busy.process.send_signal(signal.SIGINT)
    time.sleep(pause)
    busy.process.send_signal(signal.SIGINT)
    run = busy.finish(30, killed=True)
    assert run.code != pytest.ExitCode.OK
    assert not run.leftovers


@pytest.mark.nightly
def test_ctrl_c_with_xdist(start: Start) -> None:
    faulty = start("faults_midway.py", "-n", "2")
    faulty.wait_for("busy-0", "busy-1")
    faulty.process.send_signal(signal.SIGINT)
    run = faulty.finish(60)
    assert run.code == pytest.ExitCode.INTERRUPTED
    assert not run.leftovers


@pytest.mark.nightly
@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.nightly), signal.SIGKILL])
def test_a_signal_ends_pytest_and_its_ranks(busy: Faulty, number: int) -> None:
    busy.process.send_signal(number)
    run = busy.finish(30, killed=True)
    assert run.code == -number
    assert not run.leftovers


@pytest.mark.parametrize("args", [(), pytest.param(("-n", "2"), marks=pytest.mark.nightly)], ids=["alone", "xdist"])
def test_a_scheduler_that_ends_pytest_gets_the_report(start: Start, tmp_path: Path, args: tuple[str, ...]) -> None:
    report = tmp_path / "report.json"
    faulty = start("faults_midway.py", f"--distcompat-report={report}", *args)
    faulty.wait_for("busy-0", "busy-1")
    faulty.process.send_signal(signal.SIGTERM)
    run = faulty.finish(60)
    assert run.code == pytest.ExitCode.INTERRUPTED
    assert not run.leftovers
    assert Report.read(report).interrupted


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_temporary_files_of_the_killed_go_with_the_next_run(
    busy: Faulty, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy.process.send_signal(number)
    busy.finish(30, killed=True)
    assert any(busy.temporary.glob("distcompat-*")), "what is to be removed is there"
    # The next run begins with that.
    monkeypatch.setattr("tempfile.tempdir", str(busy.temporary))
    remove_abandoned()
    assert temporaries(busy.temporary) == {default_directory().name}


@pytest.mark.parametrize("option", ["--forked", "--forks-by-another-name"])
def test_plugins_that_fork_are_refused(start: Start, option: str) -> None:
    run = start(FAILING, "-p", "tests.faults.faults_forked", option, "-k", "0").finish()
    assert run.outcomes in ({}, {"test_fails[0]": "failed"})
    assert "in a fork of pytest's process" in run.out
    assert "ValueError" not in run.out
    assert not run.leftovers


@pytest.mark.nightly
def test_maxfail(start: Start) -> None:
    run = start(FAILING, "--maxfail=2").finish()
    assert run.outcomes == {"test_fails[0]": "failed", "test_fails[1]": "failed"}
    assert "stopping after 2 failures" in run.out
    assert not run.leftovers


@pytest.mark.nightly
@pytest.mark.parametrize("args", [(), pytest.param((REUSE,), marks=pytest.mark.nightly)], ids=["fresh", "reused"])
def test_maxfail_with_xdist(start: Start, args: tuple[str, ...]) -> None:
    run = start(MANY_FAILING, "-n", "2", "--maxfail=2", *args).finish()
    assert "stopping after 2 failures" in run.out
    # Tests that the other worker had begun are still reported.
    assert 2 <= len(run.outcomes) <= 4, run.out
    assert set(run.outcomes.values()) == {"failed"}, run.out
    assert run.code == pytest.ExitCode.INTERRUPTED
    assert not run.leftovers


@pytest.mark.nightly
@pytest.mark.parametrize("args", [(), pytest.param((REUSE,), marks=pytest.mark.nightly)], ids=["fresh", "reused"])
def test_workers_of_xdist_die(start: Start, args: tuple[str, ...]) -> None:
    run = start(KILLS_ITS_WORKER, "-n", "2", *args).finish(killed=True)
    assert run.code == pytest.ExitCode.TESTS_FAILED
    failed = {"test_worker_dies", "test_worker_exits"}
    assert {name for name, end in run.outcomes.items() if end == "failed"} == failed, run.out
    for name in failed:
        assert "crashed while running" in "\n".join(run.lines(name))
    assert {f"test_next[{number}]" for number in range(3)} <= set(run.outcomes)
    assert not run.leftovers


@pytest.mark.nightly
def test_time_limits_of_others(start: Start) -> None:
    # faulthandler_timeout writes stacks of pytest itself and ends nothing; pytest-timeout's limit is taken over.
    run = start(SLOW, "-o", "faulthandler_timeout=0.5", "--timeout=20").finish()
    assert run.outcomes == {"test_slow": "passed", "test_hangs": "failed", "test_hangs_too": "failed"}, run.out
    run.shows(
        "test_hangs",
        "time limit of 3 s: rank 0 *with barrier (default_pg, #2) unfinished; rank 1 is in test_hangs at *",
    )
    run.shows("test_hangs_too", "time limit of 2 s: rank 1 is in test_hangs_too at *")
    assert not run.leftovers


@pytest.mark.nightly
def test_without_other_plugins(start: Start) -> None:
    without = [f"-pno:{name}" for name in ("xdist", "timeout", "faulthandler", "cacheprovider", "junitxml", "logging")]
    run = start(FAILING, "-k", "0", "--capture=sys", *without).finish()
    assert run.outcomes == {"test_fails[0]": "failed"}, run.out
    run.shows("test_fails[0]", "rank 1 failed: ValueError: 0", "consequences:", "  rank 0 *")
    assert not run.leftovers
