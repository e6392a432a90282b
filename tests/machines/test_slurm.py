"""The executor ``slurm`` under a real Slurm, with two nodes on this machine, that the test starts. ``make machines`` installs it."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import shlex
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.machines.cluster import cluster, needs_slurm

from pytest_distcompat import clock

pytestmark = [pytest.mark.spawn, pytest.mark.nightly, needs_slurm]


@pytest.fixture(scope="module")
def slurm(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with cluster(environment, tmp_path_factory.mktemp("slurm")) as inside:
        yield inside


def test_two_nodes_of_an_allocation(slurm: dict[str, str], tmp_path: Path) -> None:
    shutil.copy(Path(__file__).parents[1] / "nodes" / "two_nodes.py", tmp_path / "test_two_nodes.py")
    line = ["salloc", "--nodes=2", "--ntasks=2", sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-k"]
    line += ["sum or assertion or killed", "--distcompat-executor", "slurm"]
    completed = subprocess.run(line, env=slurm, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    assert "2 failed, 1 passed" in completed.stdout, completed.stdout + completed.stderr
    assert "test_assertion - rank 1 on n2 failed: AssertionError: one is wrong" in completed.stdout
    assert "test_killed - rank 1 on n2 was killed by SIGKILL" in completed.stdout
    assert "srun: error" not in completed.stderr
    left = subprocess.run(["squeue", "--noheader", "--states=R"], env=slurm, capture_output=True, text=True, check=True)
    assert left.stdout == ""


WORKERS = """
import os
import pytest

@pytest.mark.distcompat(world_size=2)
@pytest.mark.parametrize("number", range(4))
def test_where(process_group, number):
    assert os.environ["SLURMD_NODENAME"] == "n3"
"""


def test_workers_have_their_runs_on_a_node_each(slurm: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "test_workers.py").write_text(WORKERS)
    line = ["salloc", "--nodes=2", "--ntasks=2", sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "2"]
    line += ["--distcompat-worker-nodes", "2", "--distcompat-executor", "slurm"]
    completed = subprocess.run(line, env=slurm, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    assert "4 failed" in completed.stdout, completed.stdout + completed.stderr
    seen = set(re.findall(r"rank \d on (n\d) failed: AssertionError: assert '(n\d)' == 'n3'", completed.stdout))
    assert seen == {("n1", "n1"), ("n2", "n2")}, completed.stdout


def test_without_an_allocation(environment: dict[str, str], tmp_path: Path) -> None:
    shutil.copy(Path(__file__).parents[1] / "nodes" / "two_nodes.py", tmp_path / "test_two_nodes.py")
    theirs = {name: value for name, value in environment.items() if not name.startswith("SLURM_")}
    line = [sys.executable, "-m", "pytest", "--distcompat-executor", "slurm"]
    completed = subprocess.run(line, env=theirs, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (
        "--distcompat-executor slurm: there is no allocation (SLURM_JOB_ID is not set)"
        in completed.stdout + completed.stderr
    )


def job_script(slurm: dict[str, str], directory: Path, *args: str) -> None:
    """Write the script of a job that runs pytest on two nodes."""
    write = [sys.executable, "-m", "pytest_distcompat.cli", "sbatch", *args, "-p", "no:cacheprovider"]
    script = subprocess.run(write, env=slurm, cwd=directory, capture_output=True, text=True, check=True).stdout
    (directory / "job.sh").write_text(script)


def test_a_job_script_that_we_wrote(slurm: dict[str, str], tmp_path: Path) -> None:
    shutil.copy(Path(__file__).parents[1] / "nodes" / "two_nodes.py", tmp_path / "test_two_nodes.py")
    job_script(slurm, tmp_path, "--", "-k", "sum or one_node")
    submit = ["sbatch", "--wait", "--output=out", "job.sh"]
    completed = subprocess.run(
        submit, env=slurm, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    written = (tmp_path / "out").read_text()
    assert completed.returncode == 0, written
    assert "nodes 2 (from option), executor slurm (from option)" in written
    assert "2 passed" in written


PREEMPTED = """
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.distcompat(world_size=2, nodes=2)

def test_before(process_group):
    pass

def test_long(process_group, rank):
    Path(__file__).with_name(f"long-{rank}").touch()
    time.sleep(600)

def test_after(process_group):
    pass
"""

PREEMPTED_ON_WORKERS = """
import time
from pathlib import Path

import pytest

@pytest.mark.distcompat(world_size=1)
@pytest.mark.parametrize("number", range(6))
def test_long(number):
    Path(__file__).with_name(f"long-{number}").touch()
    time.sleep(600)
"""


@dataclasses.dataclass(frozen=True)
class Preempted:
    """What a preempted job left: its exit code, what it printed, and the tests of its report with their failures."""

    code: int
    out: str
    tests: dict[str, str]


def preempted(slurm: dict[str, str], directory: Path, line: list[str], tests: str = PREEMPTED) -> Preempted:
    """Start a job of these tests by that line, and preempt it in mid-test."""
    (directory / "test_preempted.py").write_text(tests)
    with (directory / "out").open("w") as out:
        low = subprocess.Popen(line, env=slurm, cwd=directory, stdout=out, stderr=out)
    started = [directory / f"long-{rank}" for rank in range(2)]
    written = (directory / "out").read_text
    assert clock.wait_until(lambda: all(path.exists() for path in started), 200, every=0.1), written()
    # All processors of both nodes.
    submit = ["sbatch", "--wait", "--partition=high", "--nodes=2", "--exclusive", "--output=high", "--wrap=true"]
    high = subprocess.run(submit, env=slurm, cwd=directory, capture_output=True, text=True, timeout=300, check=False)
    assert high.returncode == 0, high.stderr
    code = low.wait(60)

    def left() -> list[str]:
        commands = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.cwd() == str(directory) and process.status() != psutil.STATUS_ZOMBIE:
                    commands.append(" ".join(process.cmdline()))
        return commands

    assert clock.wait_until(lambda: not left(), 20), left()
    assert (directory / "junit.xml").exists(), written()
    # pytest leaves the attributes of a test out that Ctrl-C ended.
    cases = [case for case in ET.parse(directory / "junit.xml").iter("testcase") if "name" in case.attrib]
    failures = {case.attrib["name"]: "".join(failure.text or "" for failure in case.iter("failure")) for case in cases}
    return Preempted(code, written(), failures)


#: The first line of a verdict.
TAKEN = "rank \\d on n[12] was lost with its node: its agent got SIGTERM: Slurm "


def test_a_job_that_is_preempted_with_a_time_of_grace(slurm: dict[str, str], tmp_path: Path) -> None:
    job_script(slurm, tmp_path, "--partition", "grace", "--", "--junitxml=junit.xml")
    failures = preempted(slurm, tmp_path, ["sbatch", "--wait", "--output=out", "job.sh"])
    assert failures.code == pytest.ExitCode.INTERRUPTED, failures.out
    # Only the steps get the signal now; pytest itself would at the end.
    assert [*failures.tests] == ["test_before", "test_long"]
    assert re.match(f"{TAKEN}preempts job \\d+", failures.tests["test_long"])
    assert re.search(r"Interrupted: Slurm preempts job \d+", failures.out), failures.out


def test_a_job_that_is_preempted_at_once(slurm: dict[str, str], tmp_path: Path) -> None:
    job_script(slurm, tmp_path, "--partition", "now", "--", "--junitxml=junit.xml")
    failures = preempted(slurm, tmp_path, ["sbatch", "--wait", "--output=out", "job.sh"])
    assert failures.code == pytest.ExitCode.INTERRUPTED, failures.out
    assert [*failures.tests][:1] == ["test_before"]
    assert "test_after" not in failures.tests
    # Which of both comes first is Slurm's.
    assert "KeyboardInterrupt: SIGTERM" in failures.out or re.search(TAKEN, failures.out), failures.out


def test_an_allocation_that_is_preempted(slurm: dict[str, str], tmp_path: Path) -> None:
    line = ["salloc", "--partition=now", "--nodes=2", "--ntasks=2", sys.executable, "-m", "pytest", "-p"]
    line += ["no:cacheprovider", "--distcompat-nodes=2", "--distcompat-executor=slurm", "--junitxml=junit.xml"]
    failures = preempted(slurm, tmp_path, line)
    assert failures.code == pytest.ExitCode.INTERRUPTED, failures.out
    # pytest is no process of the job's.
    assert [*failures.tests] == ["test_before", "test_long"]
    assert re.match(f"{TAKEN}(preempts|ends) job \\d+", failures.tests["test_long"])


def test_workers_of_a_job_that_is_preempted(slurm: dict[str, str], tmp_path: Path) -> None:
    line = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "2", "--distcompat-worker-nodes", "2"]
    line += ["--distcompat-executor=slurm", "--junitxml=junit.xml"]
    (tmp_path / "job.sh").write_text(f"#!/bin/sh\n{shlex.join(line)}\n")
    submit = ["sbatch", "--wait", "--partition=grace", "--nodes=2", "--ntasks=2", "--output=out", "job.sh"]
    failures = preempted(slurm, tmp_path, submit, PREEMPTED_ON_WORKERS)
    assert failures.code == pytest.ExitCode.INTERRUPTED, failures.out
    # Each on the node of its worker.
    texts = [failures.tests[f"test_long[{number}]"] for number in range(2)]
    verdict = re.compile(r"rank 0 on (n[12]) was lost with its node: its agent got SIGTERM: Slurm preempts job \d+")
    assert {match[1] for match in map(verdict.search, texts) if match} == {"n1", "n2"}, failures.out
    assert re.search(r"Interrupted: Slurm preempts job \d+", failures.out), failures.out


SUSPENDED = """
import time
from pathlib import Path

import pytest
from torch import distributed

pytestmark = pytest.mark.distcompat(world_size=2)

@pytest.mark.parametrize("nodes", [pytest.param(n, marks=pytest.mark.distcompat(nodes=n, timeout=12)) for n in (1, 2)])
def test_long(process_group, rank, nodes):
    for _ in range(5):
        time.sleep(1)
        distributed.barrier()
        Path(__file__).with_name(f"long-{nodes}").touch()

@pytest.mark.distcompat(nodes=2, timeout=4)
def test_hangs(process_group, rank):
    if rank == 1:
        time.sleep(600)
    distributed.barrier()
"""


@pytest.mark.parametrize("how", ["sbatch", "salloc"])
def test_a_job_that_is_suspended(how: str, slurm: dict[str, str], tmp_path: Path) -> None:
    """Verdicts are as without: with sbatch Slurm stops pytest too, with salloc the nodes alone."""
    (tmp_path / "test_suspended.py").write_text(SUSPENDED)
    # A run on one node of a pytest that goes on is none of the job's.
    chosen = "test_" if how == "sbatch" else "2 or hangs"
    options = ["--junitxml=junit.xml", "-k", chosen]
    job_script(slurm, tmp_path, "--", *options)
    line = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options]
    line = ["salloc", "--nodes=2", "--ntasks=2", *line, "--distcompat-nodes=2", "--distcompat-executor=slurm"]
    with (tmp_path / "out").open("w") as out:
        submit = ["sbatch", "--wait", "--output=out", "job.sh"] if how == "sbatch" else line
        session = subprocess.Popen(submit, env=slurm, cwd=tmp_path, stdout=out, stderr=out)
    written = (tmp_path / "out").read_text
    for nodes in (1, 2) if how == "sbatch" else (2,):
        assert clock.wait_until((tmp_path / f"long-{nodes}").exists, 200, every=0.1), written()
        listed = ["squeue", "--noheader", "--states=R", "--format=%i"]
        job = subprocess.run(listed, env=slurm, capture_output=True, text=True, check=True).stdout.strip()
        for action in ("suspend", "resume"):
            subprocess.run(["scontrol", action, job], env=slurm, check=True)
            # Longer than the time limit, and than a cut link.
            clock.sleep(14 if action == "suspend" else 0)
    session.wait(200)
    cases = ET.parse(tmp_path / "junit.xml").iter("testcase")
    failures = {case.attrib["name"]: "".join(failure.text or "" for failure in case.iter("failure")) for case in cases}
    assert failures.pop("test_hangs").startswith("time limit of 4 s: "), written()
    assert failures == dict.fromkeys(("test_long[1]", "test_long[2]") if how == "sbatch" else ("test_long[2]",), ""), (
        written()
    )
    assert re.search(r"n[12]: stopped, as in a suspended job, or very busy; time limits wait", written())
