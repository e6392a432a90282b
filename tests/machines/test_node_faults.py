"""Each fault of a node with each executor: the verdict names the node in time, later tests go on, and nothing is left."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from tests.machines.cluster import needs_ray, needs_slurm
from tests.machines.executors import NODES, Join, Nodes
from tests.machines.network import Network, needs_namespaces
from tests.machines.node_faults import EXECUTORS, FAULTS, write_tests
from tests.pytest_runs import Run, reports

from pytest_distcompat import clock

pytestmark = [pytest.mark.spawn, pytest.mark.nightly, needs_namespaces]
NEEDS = {"slurm": [needs_slurm], "ray": [needs_ray]}

TESTS = """
@pytest.mark.distcompat(world_size=2, nodes=2, timeout=200)
def test_collective(process_group, rank):
    distributed.barrier()
    if rank == 1:
        point("collective")
        time.sleep(600)
    distributed.barrier()

@pytest.mark.distcompat(world_size=2, nodes=2, timeout=200)
def test_meeting(process_group):
    pass

@pytest.mark.distcompat(world_size=2, nodes=2, timeout=200)
def test_writes(process_group, rank):
    distributed.barrier()
    if rank == 1:
        point("writes")
    distributed.barrier()
    # More than fits into what its log has of the disk already.
    print("x" * 2**20)
"""
#: Read by Python when it starts.
AHEAD = """
import time
read = time.clock_gettime
time.clock_gettime = lambda which: read(which) + (3600 if which == time.CLOCK_REALTIME else 0)
"""


def cells(*names: str) -> pytest.MarkDecorator:
    """Parametrize a test by these faults and the executors that can have them."""
    parameters = [
        pytest.param(name, executor, marks=NEEDS.get(executor, ()))
        for name in names
        for executor in EXECUTORS
        if executor not in FAULTS[name].impossible
    ]
    return pytest.mark.parametrize(("name", "executor"), parameters)


@contextlib.contextmanager
def started(
    executor: str, network: Network, directory: Path, *, number: int = 2, files: bool = True, shared: bool = True
) -> Iterator[Nodes]:
    """Yield nodes on which sessions can be started, which leave no process and no temporary files."""
    nodes = NODES[executor](network, directory, number=number, shared=shared)
    write_tests(nodes.directory, TESTS, "meeting")
    with nodes.ready():
        yield nodes
        assert clock.wait_until(lambda: not nodes.left(files=files), 30), nodes.left(files=files)


def ended(nodes: Nodes, session: subprocess.Popen[str]) -> Run:
    out = session.communicate(timeout=300)[0]
    return Run(session.returncode, out, nodes.directory, reports(nodes.directory))


def fill(nodes: Nodes) -> None:
    with contextlib.suppress(OSError):
        (nodes.disk / "filled").write_bytes(bytes(128 << 20))


def cut(nodes: Nodes) -> None:
    nodes.network.cut()


def cut_rendezvous(nodes: Nodes) -> None:
    """Cut the link once n1 has opened the store of the rendezvous, and waits for n2 there."""
    (first,), launchers = nodes.agent("n1").children(), nodes.agent().children()
    for launcher in launchers:
        launcher.suspend()
    (nodes.directory / "meeting-done").touch()
    assert clock.wait_until(lambda: nodes.network.listens(first, "n1"), 30, every=0.1)
    nodes.network.cut()
    for launcher in launchers:
        launcher.resume()


#: The test that meets the fault, and what happens then.
IN_A_TEST: Mapping[str, tuple[str, Callable[[Nodes], object]]] = {
    "killed": ("collective", lambda nodes: nodes.agent().kill()),
    "preempted": ("collective", lambda nodes: nodes.agent().terminate()),
    "taken": ("collective", lambda nodes: nodes.take()),
    "cut": ("collective", cut),
    "cut_meeting": ("meeting", cut),
    "cut_rendezvous": ("meeting", cut_rendezvous),
    "full": ("meeting", fill),
    "filled": ("writes", fill),
}


@cells(*IN_A_TEST)
def test_in_a_test(
    name: str, executor: str, network: Network, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    fault, (point, happens) = FAULTS[name], IN_A_TEST[name]
    test = f"test_{point}"
    # pytest's own node is the same with all executors.
    others = {"test_before": "passed"} | ({"test_one_node": "passed"} if executor == "join" else {})
    if name != "filled":
        # The disk stays full, and the link cut.
        restarts = executor in {"local", "slurm"} and happens not in (fill, cut, cut_rendezvous)
        others["test_after"] = "passed" if restarts else "failed"
    # The temporary files of a killed agent are removed by the next session.
    with started(executor, network, tmp_path, files=name not in {"killed", "taken"}) as nodes:

        def verdict() -> bool:
            return any(
                report.get("when") == "call" and report["nodeid"].endswith(test) for report in reports(nodes.directory)
            )

        session = nodes.session("-k", " or ".join((test, *others)))
        assert clock.wait_until((nodes.directory / point).exists, 300, every=0.05)
        began = clock.now()
        happens(nodes)
        (nodes.directory / f"{point}-done").touch()
        assert clock.wait_until(verdict, fault.within, every=0.02)
        # For benchmarks/node_faults.py.
        record_property(f"{name} {executor}", round(clock.now() - began, 1))
        run = ended(nodes, session)
        line = str(run.of(test)["text"]).partition("\n")[0]
        assert fault.text(executor) in line, run.out
        # Each names a node, one that ``scancel`` took from both of them too.
        assert re.search(r"\bn[12]\b", line), run.out
        assert run.outcomes == {test: "failed", **others}, run.out


@cells("slow")
def test_a_slow_link(name: str, executor: str, network: Network, tmp_path: Path) -> None:
    with started(executor, network, tmp_path) as nodes:
        suite = Path(__file__).parents[1] / "nodes" / "suite_on_nodes.py"
        shutil.copy(suite, nodes.directory / "test_suite_on_nodes.py")
        network.slow()
        run = ended(nodes, nodes.session("-k", "test_after or Spread and active and w2"))
        assert [*run.outcomes.values()] == ["passed", "passed"], run.out


@cells("clock", "absent", "twice")
def test_at_the_start(name: str, executor: str, network: Network, tmp_path: Path) -> None:
    with started(executor, network, tmp_path, number={"absent": 1, "twice": 3}.get(name, 2)) as nodes:
        if name == "clock":
            (nodes.disk / "site" / "sitecustomize.py").write_text(AHEAD)
        run = ended(nodes, nodes.session("-k", "test_after", "--distcompat-warm-timeout=60"))
        if isinstance(nodes, Join) and name == "twice":
            assert run.outcomes == {"test_after": "passed"}
            assert sorted(node.wait(30) for node in nodes.joined) == [0, 2]
            run = Run(0, "".join(node.communicate(timeout=30)[0] for node in nodes.joined), nodes.directory, ())
        else:
            assert run.code == pytest.ExitCode.USAGE_ERROR, run.out
        assert FAULTS[name].text(executor) in run.out
