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

pytest.importorskip("ray", reason="no Ray: make machines")
pytestmark = [pytest.mark.spawn, pytest.mark.nightly]
#: The least that Ray takes.
NODE = {"num_cpus": 2, "object_store_memory": 80 * 2**20}


@pytest.fixture(scope="module")
def cluster(environment: dict[str, str]) -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**environment, "RAY_USAGE_STATS_ENABLED": "0"}.items():
            patch.setenv(name, value)
        cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
        yield cluster
        cluster.shutdown()


def session(cluster: Any, environment: dict[str, str], directory: Path, chosen: str) -> str:
    """Return what pytest prints of a session on two nodes of the cluster."""
    shutil.copy(Path(__file__).parents[1] / "nodes" / "two_nodes.py", directory / "test_two_nodes.py")
    line = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-k", chosen, "--distcompat-executor", "ray"]
    theirs = {**environment, "RAY_ADDRESS": cluster.address}
    found = subprocess.run(line, env=theirs, cwd=directory, capture_output=True, text=True, timeout=300, check=False)
    return found.stdout + found.stderr


def test_two_nodes_of_a_cluster(cluster: Any, environment: dict[str, str], tmp_path: Path) -> None:
    found = session(cluster, environment, tmp_path, "sum")
    assert "--distcompat-executor ray: the cluster has 1 of 2 nodes" in found, found
    assert "0 of 2 nodes are there (none)" in found
    cluster.add_node(**NODE)
    cluster.wait_for_nodes()
    found = session(cluster, environment, tmp_path, "sum or assertion or killed")
    assert "2 failed, 1 passed" in found, found
    # Both are on one machine, so they are numbered.
    assert re.search(r"test_assertion - rank 1 on \S+-1 failed: AssertionError: one is wrong", found)
    assert re.search(r"test_killed - rank 1 on \S+-1 was killed by SIGKILL", found)
