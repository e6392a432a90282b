"""Workers of xdist whose runs are on a node each: verdicts as without, devices leased where they are."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from tests.nodes.test_suites import verdicts
from tests.plugin.conftest import RunPytest

from pytest_distcompat.report.document import Report

pytestmark = pytest.mark.spawn

HERE = Path(__file__).parent
TESTS = """
import os, signal
import pytest
from torch import distributed

@pytest.mark.distcompat(world_size=2)
@pytest.mark.parametrize("number", range(4))
def test_sum(process_group, number):
    distributed.barrier()

@pytest.mark.distcompat(world_size=2)
def test_killed(process_group, rank):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    distributed.barrier()
"""


@pytest.mark.nightly
def test_each_worker_has_its_runs_on_its_node(run_pytest: RunPytest, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS, encoding="utf-8")
    run = run_pytest(tmp_path, "-n", "2", "--distcompat-worker-nodes", "2", "--distcompat-report", "r.json")
    assert {**run.outcomes, "test_killed": ""} == dict.fromkeys((f"test_sum[{n}]" for n in range(4)), "passed") | {
        "test_killed": ""
    }, run.out
    # xdist writes the worker first.
    assert re.search(r"^rank 1 on n[12] was killed by SIGKILL", run.text("test_killed"), re.MULTILINE)
    timeline = Report.read(tmp_path / "r.json").session["timeline"]
    assert {(span["worker"], span["device"].split()[0]) for span in timeline} == {("gw0", "n1"), ("gw1", "n2")}
    assert {span["who"].partition("[")[0] for span in timeline} == {"test_it.py::test_sum", "test_it.py::test_killed"}


PREEMPTED = """
import os, signal, time
import psutil
import pytest

@pytest.mark.distcompat(world_size=1)
def test_preempted():
    agent = next(one for one in psutil.Process().parents() if "join" in one.cmdline())
    agent.send_signal(signal.SIGTERM)
    time.sleep(60)

@pytest.mark.distcompat(world_size=1)
@pytest.mark.parametrize("number", range(6))
def test_other(number):
    time.sleep(0.2)
"""


@pytest.mark.nightly
def test_runs_move_from_a_node_that_is_preempted(run_pytest: RunPytest, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(PREEMPTED, encoding="utf-8")
    run = run_pytest(tmp_path, "-n", "2", "--distcompat-worker-nodes", "2", "--distcompat-report", "r.json")
    others = dict.fromkeys((f"test_other[{n}]" for n in range(6)), "passed")
    assert run.outcomes == {"test_preempted": "failed", **others}, run.out
    said = r"^rank 0 on (n[12]) was lost with its node: its agent got SIGTERM$"
    match = re.search(said, run.text("test_preempted"), re.MULTILINE)
    assert match, run.out
    lost, other = ("n1", "n2") if match[1] == "n1" else ("n2", "n1")
    assert f"distcompat: {lost} is lost; {other} has the runs from now on" in run.out
    timeline = Report.read(tmp_path / "r.json").session["timeline"]
    assert {("gw0", other), ("gw1", other)} <= {(span["worker"], span["device"].split()[0]) for span in timeline}, (
        run.out
    )


@pytest.mark.nightly
def test_a_suite_has_the_verdicts_of_one_node(run_pytest: RunPytest, tmp_path: Path) -> None:
    shutil.copy(HERE / "suite_on_nodes.py", tmp_path / "test_suite.py")
    verdicts_of_runs = []
    for nodes in ("0", "2"):
        options = ("-n", "2", "--distcompat-worker-nodes", nodes, "--distcompat-report", "r.json")
        run = run_pytest(tmp_path, *options, "-k", "TestSound and w2 or TestRaises or TestDrifts")
        report = Report.read(tmp_path / "r.json")
        assert len(verdicts(report)) > 30, run.out
        verdicts_of_runs.append(verdicts(report))
    assert verdicts_of_runs[0] == verdicts_of_runs[1]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--distcompat-executor", "ray"), "--distcompat-executor ray: "),
        (
            ("--distcompat-nodes", "2"),
            "runs of one node and of several do not mix; expected no --distcompat-worker-nodes",
        ),
    ],
)
def test_what_it_does_not_go_with(
    run_pytest: RunPytest, tmp_path: Path, options: tuple[str, ...], expected: str
) -> None:
    (tmp_path / "test_it.py").write_text(TESTS, encoding="utf-8")
    run = run_pytest(tmp_path, "--distcompat-worker-nodes", "2", *options)
    assert run.code == pytest.ExitCode.USAGE_ERROR, run.out
    assert expected in run.out
