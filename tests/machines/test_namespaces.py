"""Nodes with a network between them that is cut and mended, and with disks of their own; other faults: test_node_faults.py."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import psutil
import pytest
from tests.machines.network import Network, needs_namespaces
from tests.machines.node_faults import write_tests
from tests.pytest_runs import RECORDED, Run, reports

from pytest_distcompat import clock

pytestmark = [pytest.mark.spawn, pytest.mark.nightly, needs_namespaces]

TESTS = """
@pytest.mark.distcompat(world_size=2, nodes=2, timeout=60)
def test_collective(process_group, rank):
    distributed.barrier()
    if rank == 1:
        point("collective")
        time.sleep(600)
    distributed.barrier()

@pytest.mark.distcompat(world_size=2, nodes=2, timeout=60)
def test_rendezvous(process_group):
    pass
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_tests(tmp_path, TESTS, "rendezvous")
    return tmp_path


def wait_for(directory: Path, name: str) -> None:
    assert clock.wait_until((directory / name).exists, 150, every=0.05), name


def ended(process: subprocess.Popen[str], directory: Path) -> Run:
    """Wait for the session's end, and return it."""
    out = process.communicate(timeout=200)[0]
    return Run(process.returncode, out, directory, reports(directory))


def start(network: Network, directory: Path, *tests: str) -> subprocess.Popen[str]:
    network.join(directory)
    return network.pytest(directory, "-k", " or ".join(tests), recorded=RECORDED)


def test_a_node_that_joins_again(network: Network, directory: Path) -> None:
    session = start(network, directory, "test_collective", "test_rendezvous", "test_after")
    wait_for(directory, "collective")
    network.cut()
    (directory / "collective-done").touch()
    wait_for(directory, "rendezvous")
    network.mend()
    again = network.join(directory)
    # It starts its launcher process once it is admitted.
    assert clock.wait_until(lambda: bool(psutil.Process(again.pid).children()), 60, every=0.1)
    (directory / "rendezvous-done").touch()
    run = ended(session, directory)
    assert run.outcome("test_collective") == "failed"
    assert run.outcome("test_after") == "passed", run.out
    assert again.wait(20) == 0


#: Another directory at the same path, and a copy that shows what is written on n1 only.
OTHER = "mount -t tmpfs none {0}/temporary"
COPY = (
    "mount -t tmpfs none {0}/own && mkdir {0}/own/upper {0}/own/work && mount -t overlay overlay "
    "-o lowerdir={0}/temporary,upperdir={0}/own/upper,workdir={0}/own/work {0}/temporary"
)


@pytest.mark.parametrize(
    ("mount", "finding"),
    [
        (OTHER, "n2 cannot write in {} (No such file or directory)"),
        (COPY, "does not see what n2 wrote in {}"),
    ],
)
def test_a_directory_that_nodes_do_not_share(mount: str, finding: str, network: Network, directory: Path) -> None:
    shutil.copy(Path(__file__).parents[1] / "nodes" / "suite_on_nodes.py", directory / "test_suite_on_nodes.py")
    temporary = directory / "temporary"
    for path in (temporary, directory / "own"):
        path.mkdir()
    network.join(directory, mount.format(directory))
    run = ended(network.pytest(directory, "-k", "Spread and active and w2"), directory)
    assert run.code == pytest.ExitCode.USAGE_ERROR, run.out
    text = f"{finding.format(temporary / 'base' / 'distcompat')}: suites, and tests with shared_dir, need a directory that all "
    way_out = "expected --basetemp=DIR with one, or cells with option checkpoints='node', where the driver has it"
    assert f"{text}nodes share; {way_out}" in run.out
    assert clock.wait_until(lambda: not network.left(), 20), network.left()
