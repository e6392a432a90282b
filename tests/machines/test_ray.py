"""The executor ``ray`` on a real Ray cluster, with two nodes on this machine, that the test starts. ``make machines`` installs it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.machines.cluster import needs_ray

pytestmark = [pytest.mark.spawn, pytest.mark.nightly, needs_ray]
#: The least that Ray takes.
NODE = {"num_cpus": 2, "object_store_memory": 80 * 2**20}
#: Ray counts GPUs that it is told of, whether or not they are there.
WITH_GPUS = {**NODE, "num_gpus": 2}


@pytest.fixture(scope="module")
def cluster(environment: dict[str, str]) -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        # As older releases of Ray did, nodes hide the GPUs that a task did not ask for.
        own = {"RAY_USAGE_STATS_ENABLED": "0", "CUDA_VISIBLE_DEVICES": "0,1", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1"}
        for name, value in {**environment, **own}.items():
            patch.setenv(name, value)
        cluster = Cluster(initialize_head=True, head_node_args={**WITH_GPUS, "include_dashboard": False})
        yield cluster
        cluster.shutdown()


def session(cluster: Any, environment: dict[str, str], directory: Path, chosen: str) -> str:
    """Return what pytest prints of a session on two nodes of the cluster."""
    shutil.copy(Path(__file__).parents[1] / "nodes" / "two_nodes.py", directory / "test_two_nodes.py")
    line = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-k", chosen, "--distcompat-executor", "ray"]
    theirs = {**environment, "RAY_ADDRESS": cluster.address}
    completed = subprocess.run(
        line, env=theirs, cwd=directory, capture_output=True, text=True, timeout=300, check=False
    )
    return completed.stdout + completed.stderr


def test_two_nodes_of_a_cluster(cluster: Any, environment: dict[str, str], tmp_path: Path) -> None:
    completed = session(cluster, environment, tmp_path, "sum")
    assert "--distcompat-executor ray: the cluster has 1 of 2 nodes" in completed, completed
    assert "0 of 2 nodes are there (none)" in completed
    cluster.add_node(**WITH_GPUS)
    cluster.wait_for_nodes()
    completed = session(cluster, environment, tmp_path, "sum or assertion or killed")
    assert "2 failed, 1 passed" in completed, completed
    # Both are on one machine, so they are numbered.
    assert re.search(r"test_assertion - rank 1 on \S+-1 failed: AssertionError: one is wrong", completed)
    assert re.search(r"test_killed - rank 1 on \S+-1 was killed by SIGKILL", completed)


WORKERS = """
import psutil
import pytest

@pytest.mark.distcompat(world_size=2)
@pytest.mark.parametrize("number", range(4))
def test_where(process_group, number):
    agent = next(one for one in psutil.Process().parents() if "join" in one.cmdline())
    assert agent.environ()["CUDA_VISIBLE_DEVICES"] == "x"
"""


def test_each_worker_has_an_agent_that_sees_all_gpus_of_its_node(
    cluster: Any, environment: dict[str, str], tmp_path: Path
) -> None:
    while len(cluster.list_all_nodes()) < 2:
        cluster.add_node(**WITH_GPUS)
    cluster.wait_for_nodes()
    (tmp_path / "test_workers.py").write_text(WORKERS)
    theirs = {**environment, "RAY_ADDRESS": cluster.address}
    line = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "3"]
    line += ["--distcompat-worker-nodes", "2", "--distcompat-executor", "ray"]
    done = subprocess.run(line, env=theirs, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    output = done.stdout + done.stderr
    assert "4 failed" in output, output
    shown = re.findall(r"on \S+-(\d) failed: AssertionError: assert '(\d),(\d)' == 'x'", output)
    # Ray lists them in any order.
    assert {(node, *sorted(gpus)) for node, *gpus in shown} == {("0", "0", "1"), ("1", "0", "1")}, output


def test_workers_without_a_cluster(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "test_workers.py").write_text(WORKERS)
    line = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--distcompat-worker-nodes", "2"]
    line += ["--distcompat-executor", "ray"]
    theirs = {**environment, "RAY_ADDRESS": "127.0.0.1:1"}
    completed = subprocess.run(line, env=theirs, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    refused = "--distcompat-executor ray: no Ray cluster is there (127.0.0.1:1: [Errno 111] Connection refused)"
    assert refused in completed.stdout + completed.stderr
