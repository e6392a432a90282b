"""The executor ``slurm`` under a real Slurm, with two nodes on this machine, that the test starts. ``make machines`` installs it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.machines.cluster import cluster

pytestmark = [
    pytest.mark.spawn,
    pytest.mark.nightly,
    pytest.mark.skipif(
        not shutil.which("slurmctld") or not shutil.which("munged") or os.getuid() != 0,
        reason="no Slurm and munge, or not root: make machines",
    ),
]


@pytest.fixture(scope="module")
def slurm(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with cluster(environment, tmp_path_factory.mktemp("slurm")) as inside:
        yield inside


def test_two_nodes_of_an_allocation(slurm: dict[str, str], tmp_path: Path) -> None:
    shutil.copy(Path(__file__).parents[1] / "nodes" / "two_nodes.py", tmp_path / "test_two_nodes.py")
    line = ["salloc", "--nodes=2", "--ntasks=2", sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-k"]
    line += ["sum or assertion or killed", "--distcompat-executor", "slurm"]
    found = subprocess.run(line, env=slurm, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    assert "2 failed, 1 passed" in found.stdout, found.stdout + found.stderr
    assert "test_assertion - rank 1 on n2 failed: AssertionError: one is wrong" in found.stdout
    assert "test_killed - rank 1 on n2 was killed by SIGKILL" in found.stdout
    assert "srun: error" not in found.stderr
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
    found = subprocess.run(line, env=slurm, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    assert "4 failed" in found.stdout, found.stdout + found.stderr
    seen = set(re.findall(r"rank 0 on (n\d) failed: AssertionError: assert '(n\d)' == 'n3'", found.stdout))
    assert seen == {("n1", "n1"), ("n2", "n2")}, found.stdout


def test_without_an_allocation(environment: dict[str, str], tmp_path: Path) -> None:
    shutil.copy(Path(__file__).parents[1] / "nodes" / "two_nodes.py", tmp_path / "test_two_nodes.py")
    theirs = {name: value for name, value in environment.items() if not name.startswith("SLURM_")}
    line = [sys.executable, "-m", "pytest", "--distcompat-executor", "slurm"]
    found = subprocess.run(line, env=theirs, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (
        "--distcompat-executor slurm: there is no allocation (SLURM_JOB_ID is not set)" in found.stdout + found.stderr
    )


def test_a_job_script_that_we_wrote(slurm: dict[str, str], tmp_path: Path) -> None:
    shutil.copy(Path(__file__).parents[1] / "nodes" / "two_nodes.py", tmp_path / "test_two_nodes.py")
    write = [
        sys.executable,
        "-m",
        "pytest_distcompat.cli",
        "sbatch",
        "--",
        "-k",
        "sum or one_node",
        "-p",
        "no:cacheprovider",
    ]
    script = subprocess.run(write, env=slurm, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    (tmp_path / "job.sh").write_text(script)
    submit = ["sbatch", "--wait", "--output=out", "job.sh"]
    found = subprocess.run(submit, env=slurm, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    written = (tmp_path / "out").read_text()
    assert found.returncode == 0, written
    assert "nodes 2 (from option), executor slurm (from option)" in written
    assert "2 passed" in written
