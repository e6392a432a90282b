"""Beside pytest-rerunfailures, pytest-order, pytest-cov, pytest-reportlog and xdist, with warnings as errors, on real ranks."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from tests.plugin.conftest import RunPytest

pytestmark = pytest.mark.spawn

AGAIN = """
import os, pathlib, pytest

def attempts(name, rank):
    with open(f"{name}-{rank}", "a") as file:
        file.write(f"{os.getpid()}\\n")
    return len(open(f"{name}-{rank}").readlines())

@pytest.mark.distcompat
def test_by_option(rank, process_group):
    from torch import distributed
    first = attempts("option", rank) == 1
    # On its own, a rank that repeats the test waits here for ever.
    assert rank == 0 or not first
    distributed.barrier()

@pytest.mark.distcompat
@pytest.mark.flaky(reruns=2)
def test_by_mark(rank, process_group):
    assert attempts("mark", rank) == 3

@pytest.mark.distcompat
@pytest.mark.flaky(reruns=0)
def test_never(rank):
    assert attempts("never", rank) == 2
"""


@pytest.mark.nightly
@pytest.mark.parametrize("args", [[], pytest.param(["-n", "1"], marks=pytest.mark.nightly)], ids=["alone", "xdist"])
def test_a_test_is_run_again_on_all_ranks_or_none(args: list[str], run_pytest: RunPytest, tmp_path: Path) -> None:
    (tmp_path / "test_again.py").write_text(AGAIN, encoding="utf-8")
    run = run_pytest(tmp_path, "--reruns=1", "--strict-markers", "-W", "error::pytest.PytestWarning", *args)
    last = {
        report["nodeid"].partition("::")[2]: report["outcome"] for report in run.reports if report["when"] == "call"
    }
    assert last == {"test_by_option": "passed", "test_by_mark": "passed", "test_never": "failed"}, run.out
    again = [report["nodeid"].partition("::")[2] for report in run.reports if report["outcome"] == "rerun"]
    assert again == ["test_by_option", "test_by_mark", "test_by_mark"]
    for name, times in (("option", 2), ("mark", 3), ("never", 1)):
        pids = [(tmp_path / f"{name}-{rank}").read_text(encoding="utf-8").split() for rank in range(2)]
        assert [len(pid) for pid in pids] == [times, times], name
        # Each time on new ranks.
        assert len({*pids[0], *pids[1]}) == 2 * times


#: A plugin as pytest-dependency: what has passed in this process decides. It runs as those that repeat tests do.
MADE_UP = """
import pytest

NAMES = ("dependency", "flaky", "pytest-retry")

class MadeUp:
    def __init__(self, name):
        self.name = name
        self.passed = set()

    def pytest_runtest_setup(self, item):
        needed = item.get_closest_marker("needs")
        if needed and not set(needed.args) <= self.passed:
            pytest.skip(f"{self.name}: {needed.args} did not pass")

    def pytest_runtest_logreport(self, report):
        if report.when == "call" and report.passed:
            self.passed.add(report.nodeid.partition("::")[2])

def pytest_addoption(parser, pluginmanager):
    for name in NAMES:
        pluginmanager.register(MadeUp(name), name)

def pytest_configure(config):
    config.addinivalue_line("markers", "needs(*names): skip the test unless these passed")
"""
NEEDING = """
import pytest

@pytest.mark.distcompat
def test_saves(rank):
    pass

@pytest.mark.distcompat
@pytest.mark.needs("test_saves")
def test_loads(rank):
    assert rank == 0

@pytest.mark.distcompat
@pytest.mark.needs("test_loads")
def test_resumes(rank):
    pass
"""


@pytest.mark.nightly
def test_results_of_earlier_tests_are_unknown_on_ranks(run_pytest: RunPytest, tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(MADE_UP, encoding="utf-8")
    (tmp_path / "test_needing.py").write_text(NEEDING, encoding="utf-8")
    run = run_pytest(tmp_path)
    assert run.outcomes == {"test_saves": "passed", "test_loads": "failed", "test_resumes": "skipped"}, run.out


COVERED = """
[tool.coverage.run]
patch = ["subprocess", "_exit"]
parallel = true
source = ["."]
omit = ["test_*.py"]
"""
TRAINER = """
def on_all(rank):
    words = []
    if rank == 0:
        words.append("first")
    else:
        words.append("other")
    return words

def nobody_calls():
    return 1
"""


@pytest.mark.nightly
def test_coverage_counts_lines_run_on_ranks(run_pytest: RunPytest, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(COVERED, encoding="utf-8")
    (tmp_path / "trainer.py").write_text(TRAINER, encoding="utf-8")
    (tmp_path / "test_covered.py").write_text(
        "import pytest, trainer\n@pytest.mark.distcompat\ndef test(rank):\n    assert trainer.on_all(rank)\n"
        "@pytest.mark.distcompat\ndef test_fails(rank):\n    assert not trainer.on_all(rank)\n",
        encoding="utf-8",
    )
    run = run_pytest(tmp_path, "--cov", "--cov-report=json")
    assert run.outcomes == {"test": "passed", "test_fails": "failed"}, run.out
    content = json.loads((tmp_path / "coverage.json").read_text(encoding="utf-8"))["files"]["trainer.py"]
    missing = [TRAINER.splitlines()[number - 1].strip() for number in content["missing_lines"]]
    assert missing == ["return 1"], run.out


@pytest.mark.parametrize("workers", [[], ["-n1"]])
def test_ranks_are_not_traced_twice(workers: list[str], pytester: pytest.Pytester) -> None:
    """Python has one trace function: the second would end the first."""
    (pytester.path / ".coveragerc").write_text("[run]\npatch = subprocess, _exit\n", encoding="utf-8")
    pytester.makepyfile("import pytest\n@pytest.mark.distcompat\ndef test(): pytest.fail('no')\n")
    result = pytester.runpytest_subprocess("--cov", "--cov-report=", "--distcompat-reach=r.sqlite", *workers)
    assert result.ret
    assert "coverage measures ranks already" in result.stdout.str() + result.stderr.str()


@pytest.mark.parametrize(
    ("settings", "more", "warnings"),
    [
        ("", ["--cov"], 1),
        ("patch = _exit\n", ["--cov"], 1),
        ("patch = subprocess\n", ["--cov", "-n2"], 1),
        ("patch = subprocess, _exit\n", ["--cov"], 0),
        ("", [], 0),
        ("", ["--cov", "--no-cov"], 0),
    ],
)
def test_coverage_without_that_of_ranks_is_a_warning(
    settings: str, more: list[str], warnings: int, pytester: pytest.Pytester
) -> None:
    (pytester.path / ".coveragerc").write_text(f"[run]\n{settings}", encoding="utf-8")
    pytester.makepyfile(
        "import pytest\n@pytest.mark.distcompat\ndef test(): pytest.fail('no')\ndef test_plain(): pass\n"
    )
    result = pytester.runpytest_subprocess("--setup-only", "--cov-report=", *more)
    matching = [line for line in result.outlines if "the coverage of ranks is not measured" in line]
    assert len(matching) == warnings, result.stdout.str()
    plain = pytester.runpytest_subprocess("-k", "plain", "--cov", "--cov-report=")
    assert "coverage of ranks" not in plain.stdout.str(), "no test of this session has ranks"


TOGETHER = """
import pathlib, pytest

def note(name):
    with pathlib.Path("order").open("a") as file:
        file.write(name + " ")

@pytest.mark.order(2)
@pytest.mark.distcompat
def test_second(rank): note("second")

@pytest.mark.order(1)
@pytest.mark.distcompat
def test_first(process_group, rank, record_property):
    record_property("of rank", rank)
    note("first")

@pytest.mark.distcompat
def test_warns(rank):
    import warnings
    warnings.warn("old")
"""


@pytest.mark.nightly
def test_orders_report_logs_and_warnings_as_errors(run_pytest: RunPytest, tmp_path: Path) -> None:
    (tmp_path / "test_together.py").write_text(TOGETHER, encoding="utf-8")
    run = run_pytest(tmp_path, "-W", "error", "--strict-markers", "--report-log=log.jsonl")
    assert run.outcomes == {"test_first": "passed", "test_second": "passed", "test_warns": "failed"}, run.out
    assert "UserWarning: old" in run.text("test_warns")
    assert (tmp_path / "order").read_text(encoding="utf-8").split() == ["first", "first", "second", "second"]
    logged = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    calls = {line["nodeid"]: line for line in logged if line.get("when") == "call"}
    assert len(calls) == 3
    assert ["of rank", 0] in calls["test_together.py::test_first"]["user_properties"]
    assert len([line for line in logged if line["$report_type"] == "SessionFinish"]) == 1
