"""How well workers that are dealt out over nodes keep all devices busy: the session's length against the ideal.

``python benchmarks/packing_nodes.py`` has 40 tests of 1, 2 and 4 ranks on two nodes, each with the CPU slots of this machine, by
real pytest-xdist, node agents and leases; ranks only take their time. ``--simulate`` computes the same for 64 nodes of 8 GPUs,
2,560 tests, and 2, 4 and 8 workers a node.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from machine import measured_on  # type: ignore[import-not-found] # a script imports from its own directory
from packing import drawn, length  # type: ignore[import-not-found]

from pytest_distcompat.lease import pack, read_timeline
from pytest_distcompat.lease.packing import ideal

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.lease.simulation import simulate

NODES = 2
TESTS = """
import json, time
import pytest

with open("script.json") as file:
    CASES = [pytest.param(time, id=name, marks=pytest.mark.distcompat(world_size=size)) for name, size, time in json.load(file)]

@pytest.mark.parametrize("seconds", CASES)
def test(seconds):
    time.sleep(seconds)
"""
#: Nodes with a directory for leases of their own, as other machines have.
CONFTEST = """
import os
from pytest_distcompat.ext.cluster.executors import EXECUTORS
from pytest_distcompat.ext.cluster.executors.local import Local

class Apart(Local):
    name = "apart"

    def restart(self, join, name, token):
        os.makedirs(name, exist_ok=True)
        before, os.environ["TMPDIR"] = os.environ["TMPDIR"], os.path.abspath(name)
        try:
            return super().restart(join, name, token)
        finally:
            os.environ["TMPDIR"] = before

EXECUTORS.by_name["apart"] = Apart
"""


def real(seed: int, scale: float, each: int) -> None:
    """Run the tests on two nodes and print."""
    demands = drawn(seed, 40, (1, 2, 4), scale)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "test_it.py").write_text(TESTS, encoding="utf-8")
        (directory / "conftest.py").write_text(CONFTEST, encoding="utf-8")
        script = [(demand.id, demand.world_size, demand.seconds) for demand in demands]
        (directory / "script.json").write_text(json.dumps(script), encoding="utf-8")
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-n",
            str(each * NODES),
            "--basetemp",
            str(directory / "base"),
        ]
        nodes = [
            "--distcompat-gpus=0",
            f"--distcompat-worker-nodes={NODES}",
            "--distcompat-executor=apart",
        ]
        subprocess.run(
            [*command, *nodes],
            cwd=name,
            env={**os.environ, "TMPDIR": name},
            check=True,
            stdout=subprocess.DEVNULL,
        )
        spans = read_timeline(directory / "base" / "distcompat")
    assert len(spans) == len(demands)
    took = length(spans)
    used = {device for span in spans for device in span.ids}
    best = ideal(demands, len(used), each * NODES)
    print(f"{len(spans)} tests by {each} workers a node on {len(used)} slots of {NODES} nodes:")
    print(f"{took:.1f} s, ideal {best:.1f} s: x {took / best:.2f}")


def main() -> None:
    """Measure, or simulate."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--simulate", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", type=float, default=0.1)
    parser.add_argument("--workers", type=int, default=3, help="of a node")
    arguments = parser.parse_args()
    print(f"{measured_on('pytest', 'pytest-xdist')}\n")
    if not arguments.simulate:
        real(arguments.seed, arguments.scale, arguments.workers)
        return
    nodes, devices = 64, 8
    demands = drawn(arguments.seed, 40 * nodes, (1, 2, 4, 8))
    print("| workers a node | x ideal |\n| --- | --- |")
    for each in (2, 4, 8):
        found = simulate(pack(demands, nodes * devices, nodes * each), devices, each, nodes=nodes)
        print(f"| {each} | {found.makespan / found.ideal:.2f} |")


if __name__ == "__main__":
    main()
