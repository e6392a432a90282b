"""What a run over two nodes costs beside one node, and beside plain torchrun on the same two nodes.

``python benchmarks/nodes.py [--rounds 3] [WAY ...]`` prints a Markdown table. Ways are ``one`` (one node), ``local`` (two node
agents here), ``join`` (two network namespaces, as root), ``slurm`` (two nodes of a Slurm on this machine, as root) and ``ray``
(a running Ray cluster of two network namespaces, with ``ray[default]``, as root). A marked test does an all_reduce on two gloo
ranks; a cell trains ten parameters under DDP for 20 steps, with all that the probe reads. ``warm`` is the median of the tests
after the first of a session, ``session`` a session with one, the start of pytest and of all nodes included. ``torchrun`` is plain
torchrun on each node, which does the same; under Slurm by ``srun``, on Ray by ``ray job submit``.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

from machine import expect, measured_on  # type: ignore[import-not-found] # a script imports from its own directory

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.machines.cluster import cluster, ray_cluster  # noqa: E402
from tests.machines.network import Network  # noqa: E402

TESTS = """
import pytest
from tests.plugin.adopter import Mine
from pytest_distcompat import CompatSuite, Matrix

@pytest.mark.distcompat(world_size=2)
@pytest.mark.parametrize("number", range(6))
def test_sum(process_group, number):
    import torch
    from torch import distributed
    total = torch.ones(1)
    distributed.all_reduce(total)
    assert total.item() == 2

"""
SUITE = """
class Trainer{0}(Mine): pass
class TestTrainer{0}(CompatSuite):
    driver = f"{{__name__}}:Trainer{0}"
    matrix = Matrix(("ddp",), ("fp32",))
"""
SCRIPT = """
import torch
from torch import distributed
distributed.init_process_group("gloo")
total = torch.ones(1)
distributed.all_reduce(total)
assert total.item() == 2
distributed.destroy_process_group()
"""
#: A job of Ray: torchrun on each node, in the directory of the first argument.
JOB = """
import socket, subprocess, sys
import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

@ray.remote(num_cpus=1)
def run(directory, python, dash_m, torchrun, *rest):
    name = socket.gethostname()
    own = [f"--rdzv-conf=is_host={name == 'n1'}", f"--local-addr=10.97.0.{name[1:]}"]
    subprocess.run([python, dash_m, torchrun, *own, *rest], cwd=directory, check=True)

ray.init()
group = placement_group([{"CPU": 1}] * 2, strategy="STRICT_SPREAD")
where = [PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number) for number in range(2)]
ray.get([run.options(scheduling_strategy=one).remote(*sys.argv[1:]) for one in where])
"""
TORCHRUN = [
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--nnodes=2",
    "--nproc-per-node=1",
    "--rdzv-backend=c10d",
]


class OneNode:
    """Both ranks on one node."""

    options: tuple[str, ...] = ()

    def __init__(self, directory: Path, environment: dict[str, str]) -> None:
        self.directory, self.environment = directory, environment

    def session(self, line: list[str]) -> None:
        """Run a session of pytest."""
        self._run([*line, *self.options])

    def torchrun(self, target: list[str]) -> None:
        """Run torchrun on all nodes."""
        self._run(
            [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node=2",
                *target,
            ]
        )

    def _start(self, line: list[str]) -> subprocess.Popen[str]:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen(line, cwd=self.directory, env=self.environment, **pipes)  # type: ignore[call-overload, no-any-return]

    def _run(self, line: list[str]) -> None:
        _end(self._start(line))


class Local(OneNode):
    """Two nodes here."""

    options = ("--distcompat-nodes=2",)

    def torchrun(self, target: list[str]) -> None:
        """Run one torchrun for each node."""
        where = [f"--rdzv-endpoint=127.0.0.1:{_free_port()}", "--local-addr=127.0.0.1"]
        for process in [self._start([*TORCHRUN, *where, *target]) for _ in range(2)]:
            _end(process)


class Join(OneNode):
    """Two nodes with a network of their own."""

    def __init__(self, directory: Path, environment: dict[str, str], network: Network) -> None:
        super().__init__(directory, environment)
        self._network = network

    def session(self, line: list[str]) -> None:
        """Run a session on the first node, which the second one joins."""
        agent = self._network.join(self.directory)
        _end(self._network.pytest(self.directory, "--distcompat-nodes=2", *line[3:]))
        _end(agent)

    def torchrun(self, target: list[str]) -> None:
        """Run torchrun on each node."""
        line = [*TORCHRUN, "--rdzv-endpoint=10.97.0.1:29400"]
        started = [
            self._network.popen(
                f"n{number}",
                [
                    *line,
                    f"--rdzv-conf=is_host={number == 1}",
                    f"--local-addr=10.97.0.{number}",
                    *target,
                ],
                self.directory,
            )
            for number in (1, 2)
        ]
        for process in started:
            _end(process)


class Slurm(OneNode):
    """Two nodes of an allocation, which is part of the session."""

    options = ("--distcompat-nodes=2", "--distcompat-executor=slurm")
    allocate = ("salloc", "--quiet", "--nodes=2", "--ntasks=2")

    def session(self, line: list[str]) -> None:
        """Run a session in an allocation."""
        self._run([*self.allocate, *line, *self.options])

    def torchrun(self, target: list[str]) -> None:
        """Run torchrun by srun."""
        where = f"--rdzv-endpoint={socket.gethostname()}:{_free_port()}"
        self._run([*self.allocate, "srun", "--ntasks-per-node=1", *TORCHRUN, where, *target])


class Ray(OneNode):
    """Two nodes of a running cluster."""

    def __init__(self, directory: Path, environment: dict[str, str], network: Network) -> None:
        super().__init__(directory, environment)
        self._network = network
        (directory / "job.py").write_text(JOB)

    def session(self, line: list[str]) -> None:
        """Run a session on the first node."""
        _end(self._on_first([*line, "--distcompat-nodes=2", "--distcompat-executor=ray"]))

    def torchrun(self, target: list[str]) -> None:
        """Submit a job that runs torchrun on each node."""
        target = [str(self.directory), *TORCHRUN, "--rdzv-endpoint=10.97.0.1:29400", *target]
        submit = ["ray", "job", "submit", "--address=http://127.0.0.1:8265", "--"]
        _end(self._on_first([*submit, sys.executable, str(self.directory / "job.py"), *target]))

    def _on_first(self, line: list[str]) -> subprocess.Popen[str]:
        return self._network.popen("n1", line, self.directory)


@contextlib.contextmanager
def way(name: str, directory: Path, environment: dict[str, str]) -> Iterator[OneNode]:
    """Yield what runs sessions that way."""
    if name in {"join", "ray"}:
        network = Network(environment)
        network.make()
        try:
            if name == "join":
                yield Join(directory, environment, network)
            else:
                ray = directory / "ray"
                ray.mkdir()
                on_node = functools.partial(network.inside, directory=ray)
                with ray_cluster(
                    {**environment, "GLOO_SOCKET_IFNAME": "eth0"}, ray, on_node, dashboard=True
                ) as own:
                    network.environment |= own
                    yield Ray(directory, own, network)
        finally:
            network.remove()
    elif name == "slurm":
        slurm = directory / "slurm"
        slurm.mkdir()
        with cluster(environment, slurm) as inside:
            yield Slurm(directory, inside)
    else:
        yield {"one": OneNode, "local": Local}[name](directory, environment)


WAYS = {
    "one": "one node",
    "local": "two nodes here",
    "join": "`join`, two namespaces",
    "slurm": "Slurm, two nodes",
    "ray": "Ray, two namespaces",
}


def figures(name: str) -> list[float]:
    """Run each part once that way; return the seconds of each column of the table."""
    with tempfile.TemporaryDirectory(prefix="nodes-") as made:
        directory = Path(made)
        (directory / "test_nodes.py").write_text(TESTS + "".join(map(SUITE.format, range(4))))
        (directory / "script.py").write_text(SCRIPT)
        importable = directory / "importable" / "tests" / "plugin"
        importable.mkdir(parents=True)
        shutil.copy(ROOT / "tests" / "plugin" / "adopter.py", importable)
        own = {
            "PYTHONPATH": str(importable.parents[1]),
            "HF_HUB_OFFLINE": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        with way(name, directory, {**os.environ, **own}) as runs:
            return [*_marked(runs), *_cell(runs)]


def _marked(runs: OneNode) -> list[float]:
    _session(runs, "-k", "test_sum")
    cases = {
        case.get("name", ""): float(case.get("time", 0))
        for case in ET.parse(runs.directory / "junit.xml").iter("testcase")
    }
    warm = statistics.median(seconds for case, seconds in cases.items() if case != "test_sum[0]")
    alone = _session(runs, "-k", "test_sum and 3")
    return [warm, alone, _timed(lambda: runs.torchrun([str(runs.directory / "script.py")]))]


def _cell(runs: OneNode) -> list[float]:
    report = "--distcompat-report=report.json"
    _session(runs, "-k", "TestTrainer and active", report)
    found = json.loads((runs.directory / "report.json").read_text())["runs"]
    warm = statistics.median(run["seconds"] for run in found[1:])
    alone = _session(runs, "-k", "TestTrainer0 and active", report)
    request = next(runs.directory.glob("**/runs/*/request.json"))
    by_hand = ["-m", "pytest_distcompat.launch.rank", str(request), "--by-hand"]
    return [warm, alone, _timed(lambda: runs.torchrun(by_hand))]


def _session(runs: OneNode, *args: str) -> float:
    line = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:randomly",
        "-p",
        "no:cacheprovider",
        "--junitxml=junit.xml",
    ]
    line += ["--distcompat-gpus=0", f"--basetemp={runs.directory / 'temporary' / 'base'}", *args]
    (runs.directory / "temporary").mkdir(exist_ok=True)
    return _timed(lambda: runs.session(line))


def _timed(call: object) -> float:
    began = time.monotonic()
    call()  # type: ignore[operator]
    return time.monotonic() - began


def _end(process: subprocess.Popen[str]) -> None:
    out = process.communicate(timeout=300)[0]
    if process.returncode:
        raise SystemExit(f"{process.args!r} ended with {process.returncode}:\n{out[-3000:]}")


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ways", nargs="*", metavar="WAY", help=f"of {', '.join(WAYS)} (all)")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    expect(parser, options.ways, WAYS)
    found: dict[str, list[list[float]]] = {}
    # Every round runs every way once, so that a slow minute of the machine hits all.
    for _ in range(options.rounds):
        for name in options.ways or WAYS:
            found.setdefault(name, []).append(figures(name))
    print(f"{measured_on('torch', 'pytest')}\n")
    print(
        "| seconds | test, warm | test, session | torchrun | cell, warm | cell, session | torchrun |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, rounds in found.items():
        medians = (statistics.median(column) for column in zip(*rounds, strict=True))
        print(f"| {WAYS[name]} | {' | '.join(f'{seconds:.2g}' for seconds in medians)} |")


if __name__ == "__main__":
    main()
