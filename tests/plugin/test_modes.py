"""Tests on real ranks under common pytest options, and beside other plugins."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.plugin.conftest import RunPytest

pytestmark = pytest.mark.spawn

FEW = """
import os
import pytest

mark = pytest.mark.distcompat(world_size=2)

@pytest.fixture(scope="module")
def of_module():
    return [os.getpid()]

def test_unmarked_before(of_module):
    of_module.append(os.getpid())

@mark
def test_group(process_group, world_size, of_module):
    assert process_group.size() == world_size == 2
    assert of_module == [os.getpid()]

@mark
@pytest.mark.parametrize("x", ["a b/c"])
def test_fails(x, rank):
    if rank == 1:
        raise ValueError("the cause")

@mark
def test_skips():
    pytest.skip("no need")

@mark
def test_worker(rank, worker_id):
    print("rank", rank, "of", worker_id)
    assert worker_id == os.environ.get("PYTEST_XDIST_WORKER", "master")

def test_unmarked_after(of_module, request):
    # With xdist another worker may have had the first test.
    assert of_module in ([os.getpid()], [os.getpid(), os.getpid()])
"""
ENDS = {
    "test_unmarked_before": "passed",
    "test_group": "passed",
    "test_fails[a b/c]": "failed",
    "test_skips": "skipped",
    "test_worker": "passed",
    "test_unmarked_after": "passed",
}
HANGING = """
import time
import pytest

pytestmark = pytest.mark.distcompat(world_size=2)

def limit(method):
    return pytest.param(1, id=method, marks=pytest.mark.timeout(0.5, method=method))

@pytest.mark.parametrize("x", [limit("signal"), limit("thread")])
def test_hangs(x, rank):
    if rank == 1:
        time.sleep(60)

def test_slow(rank):
    time.sleep(0.3)
"""

OPTION_CONFTEST = """
import pytest

def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes long")

def pytest_collection_modifyitems(config, items):
    if "slow" not in config.getoption("-m") or "fails" not in config.getoption("-k"):
        for item in items:
            item.add_marker(pytest.mark.skip(reason="not asked for"))
"""
SLOW = """
import pytest

@pytest.mark.slow
@pytest.mark.distcompat
def test_fails(rank):
    assert rank == 0

@pytest.mark.distcompat
def test_quick(rank):
    pass
"""

LOGS = """
import logging
import pytest

log = logging.getLogger("trainer")

def test_before():
    log.warning("before")

@pytest.mark.distcompat
def test_on_ranks(rank):
    log.warning("on a rank")

def test_after():
    log.warning("after")
"""


@pytest.fixture
def suite_directory(tmp_path: Path) -> Path:
    (tmp_path / "test_few.py").write_text(FEW, encoding="utf-8")
    return tmp_path


@pytest.mark.nightly
def test_importlib_strict_without_cache_and_without_capture(suite_directory: Path, run_pytest: RunPytest) -> None:
    run = run_pytest(
        suite_directory,
        "--import-mode=importlib",
        "-p",
        "no:cacheprovider",
        "--strict-markers",
        "-W",
        "error",
        "-s",
        "--setup-show",
    )
    assert run.outcomes == ENDS, run.out
    # With -s what ranks print is shown, and once.
    assert run.out.count("rank 0 of master") == run.out.count("rank 1 of master") == 1
    assert "rank 1 failed: ValueError: the cause" in run.text("test_fails[a b/c]")


@pytest.mark.nightly
def test_exitfirst_stops_and_last_failed_runs_the_failed_test_again(
    suite_directory: Path, run_pytest: RunPytest
) -> None:
    run = run_pytest(suite_directory, "-x")
    assert run.outcomes == dict(list(ENDS.items())[:3]), run.out
    assert "stopping after 1 failures" in run.out
    again = run_pytest(suite_directory, "--lf", "-k", "fails or group", "--distcompat-launcher=torchrun")
    assert again.outcomes == {"test_fails[a b/c]": "failed"}, again.out
    assert again.text("test_fails[a b/c]").splitlines()[0] == "rank 1 failed: ValueError: the cause"


@pytest.mark.nightly
def test_options_reach_a_conftest_on_ranks(tmp_path: Path, run_pytest: RunPytest) -> None:
    (tmp_path / "conftest.py").write_text(OPTION_CONFTEST, encoding="utf-8")
    (tmp_path / "test_slow.py").write_text(SLOW, encoding="utf-8")
    run = run_pytest(tmp_path, "-m", "slow", "-k", "fails")
    assert run.outcomes == {"test_fails": "failed"}, run.out
    assert run.text("test_fails").splitlines()[0] == "rank 1 failed: assert 1 == 0"


@pytest.mark.nightly
def test_the_log_file_of_the_ini_file_is_written_by_pytest_alone(tmp_path: Path, run_pytest: RunPytest) -> None:
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\nlog_file = tests.log\nlog_file_format = %(message)s\n", encoding="utf-8"
    )
    (tmp_path / "test_logs.py").write_text(LOGS, encoding="utf-8")
    run = run_pytest(tmp_path)
    assert run.code == 0, run.out
    assert (tmp_path / "tests.log").read_text(encoding="utf-8").split("\n") == ["before", "after", ""]


@pytest.mark.nightly
def test_xdist(suite_directory: Path, run_pytest: RunPytest) -> None:
    run = run_pytest(suite_directory, "-n", "2")
    assert run.outcomes == ENDS, run.out
    assert "\nrank 1 failed: ValueError: the cause\n" in run.text("test_fails[a b/c]")  # after the worker's name


@pytest.mark.nightly
def test_the_torchrun_launcher(suite_directory: Path, run_pytest: RunPytest) -> None:
    run = run_pytest(suite_directory, "--distcompat-launcher=torchrun", "-k", "not fails and not skips")
    assert run.outcomes == {name: end for name, end in ENDS.items() if end == "passed"}, run.out
    assert "torchrun launcher" in run.out
    assert run.sections("test_worker")["Captured stdout call (rank 1)"] == "rank 1 of master\n"


@pytest.mark.nightly
def test_pytest_timeout_limits_the_ranks_without_the_warm_up(tmp_path: Path, run_pytest: RunPytest) -> None:
    (tmp_path / "test_hanging.py").write_text(HANGING, encoding="utf-8")
    run = run_pytest(tmp_path, "--timeout=1", "-o", "faulthandler_timeout=0.1")
    assert run.outcomes == {"test_hangs[signal]": "failed", "test_hangs[thread]": "failed", "test_slow": "passed"}, (
        run.out
    )
    for method in ("signal", "thread"):
        text = run.text(f"test_hangs[{method}]")
        assert text.startswith("time limit of 0.5 s: rank 1 is in test_hangs at test_hanging.py:")
        assert "in test_hangs" in text
