"""A suite's cells, sound and not, have the verdicts of one node on two namespaces, under Slurm and on Ray."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.machines.cluster import cluster, needs_ray, needs_slurm
from tests.machines.network import needs_namespaces
from tests.nodes.test_suites import run_on, verdicts
from tests.plugin.conftest import RunPytest

from pytest_distcompat.report.document import Report

if TYPE_CHECKING:
    from tests.machines.network import Network

# Of all that needs nodes of its own, these run every day.
pytestmark = pytest.mark.spawn

HERE = Path(__file__).parent
CHOSEN = ("-k", "TestSound and w2 or TestRaises or TestDrifts")
OPTIONS = (*CHOSEN, "--distcompat-timeout", "30", "--distcompat-report", "report.json", "--distcompat-nodes", "2")
Verdicts = dict[tuple[str, str, str], tuple[Any, ...]]


def copied(directory: Path) -> Path:
    shutil.copy(HERE.parent / "nodes" / "suite_on_nodes.py", directory / "test_spread.py")
    return directory


@pytest.fixture(scope="module")
def expected(run_pytest: RunPytest, tmp_path_factory: pytest.TempPathFactory) -> Verdicts:
    _, report = run_on(1, run_pytest, copied(tmp_path_factory.mktemp("one")), *CHOSEN)
    assert len(verdicts(report)) > 30
    return verdicts(report)


def on_two(command: list[str], environment: dict[str, str], directory: Path, executor: str) -> Verdicts:
    """Return the verdicts of a session over two nodes."""
    line = [*command, sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *OPTIONS]
    line += ["--distcompat-executor", executor]
    done = subprocess.run(
        line, env=environment, cwd=directory, capture_output=True, text=True, timeout=600, check=False
    )
    assert (directory / "report.json").exists(), done.stdout + done.stderr
    return verdicts(Report.read(directory / "report.json"))


@pytest.mark.nightly
@needs_namespaces
def test_two_namespaces(network: Network, expected: Verdicts, tmp_path: Path) -> None:
    network.join(copied(tmp_path))
    out, _ = network.pytest(tmp_path, *OPTIONS).communicate(timeout=600)
    assert (tmp_path / "report.json").exists(), out
    assert verdicts(Report.read(tmp_path / "report.json")) == expected


@needs_slurm
def test_slurm(environment: dict[str, str], expected: Verdicts, tmp_path: Path) -> None:
    (tmp_path / "cluster").mkdir()
    with cluster(environment, tmp_path / "cluster") as inside:
        assert on_two(["salloc", "--nodes=2", "--ntasks=2"], inside, copied(tmp_path), "slurm") == expected


@needs_ray
def test_ray(environment: dict[str, str], expected: Verdicts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.cluster_utils import Cluster
    from tests.machines.test_ray import NODE

    for name, value in {**environment, "RAY_USAGE_STATS_ENABLED": "0"}.items():
        monkeypatch.setenv(name, value)
    nodes = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    try:
        nodes.add_node(**NODE)
        nodes.wait_for_nodes()
        verdicts = on_two([], {**environment, "RAY_ADDRESS": nodes.address}, copied(tmp_path), "ray")
    finally:
        nodes.shutdown()
    assert verdicts == expected
