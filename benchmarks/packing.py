"""40 tests of world sizes 1, 2 and 4 on 8 made-up GPUs, by real pytest-xdist and real leases; ranks only take their time.

``python benchmarks/packing.py [--workers 8] [--scale 0.05] [--seed 0]`` prints a Markdown table: how long the
GPUs were wanted, against the ideal, in xdist's own order, packed without any knowledge, and packed by what the run before
took. A test lasts 5 to 60 seconds times ``--scale``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from machine import measured_on  # type: ignore[import-not-found] # a script imports from its own directory

from pytest_distcompat.lease import Demand, Span, read_timeline
from pytest_distcompat.lease.packing import ideal

STAND_IN = Path(__file__).parents[1] / "tests" / "lease"

TESTS = """
import json
import pytest

def case(name):
    number, _, size = name.removesuffix("]").partition("[")[2].partition("-w")
    return pytest.param(number, id=f"{number}-w{size}", marks=pytest.mark.distcompat(world_size=int(size)))

with open("script.json") as file:
    CASES = [case(name) for name in json.load(file)]

@pytest.mark.parametrize("number", CASES)
def test(number): pass
"""
#: Who puts tests into an order of his own gets it, and is not packed.
AS_XDIST_DOES = """
def pytest_collection_modifyitems(items):
    items[0], items[1] = items[1], items[0]
"""


def drawn(seed: int, number: int, sizes: Sequence[int], scale: float = 1.0) -> list[Demand]:
    """Return so many tests with sizes and durations of 5 to 60 seconds, times ``scale``."""
    chance = random.Random(seed)
    found = [(chance.choice(sizes), round(chance.uniform(5, 60) * scale, 3)) for _ in range(number)]
    return [
        Demand(f"test[{index}-w{size}]", size, seconds)
        for index, (size, seconds) in enumerate(found)
    ]


def length(spans: Sequence[Span]) -> float:
    """Return for how long devices were wanted, in seconds."""
    return max(span.released for span in spans) - min(span.got for span in spans)


def run(directory: Path, workers: int) -> list[Span]:
    environment = {**os.environ, "TMPDIR": str(directory), "PYTHONPATH": str(STAND_IN)}
    for name in ("CUDA_VISIBLE_DEVICES", "PYTEST_ADDOPTS"):
        environment.pop(name, None)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "stand_in",
        "-n",
        str(workers),
        "--dist",
        "load",
    ]
    base = directory / "base"
    done = subprocess.run(
        [*command, "--basetemp", str(base), str(directory)],
        cwd=directory,
        env=environment,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout.decode()
    return read_timeline(base / "distcompat")


def main() -> None:
    """Run all three ways and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--scale", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(f"{measured_on('pytest', 'pytest-xdist')}\n")
    demands = drawn(arguments.seed, 40, (1, 2, 4), arguments.scale)
    best = ideal(demands, 8, arguments.workers)
    print(f"{len(demands)} tests, 8 GPUs, {arguments.workers} workers, ideal {best:.1f} s\n")
    print("| order | seconds | x ideal | GPUs leased |\n| --- | --- | --- | --- |")
    ids = [f"GPU-{number}" for number in range(8)]
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "test_forty.py").write_text(TESTS, encoding="utf-8")
        (directory / "script.json").write_text(
            json.dumps({demand.id: {"seconds": demand.seconds} for demand in demands}),
            encoding="utf-8",
        )
        conftest = directory / "conftest.py"
        for order in ("as xdist does", "packed, nothing known", "packed by the run before"):
            conftest.write_text(AS_XDIST_DOES if order == "as xdist does" else "", encoding="utf-8")
            if order == "packed, nothing known":
                # What the first run left would be known.
                subprocess.run(["rm", "-rf", str(directory / ".pytest_cache")], check=True)
            spans = run(directory, arguments.workers)
            assert len(spans) == len(demands)
            took = length(spans)
            leased = sum(len(span.ids) * span.seconds for span in spans)
            print(
                f"| {order} | {took:.1f} | {took / best:.2f} | {leased / len(ids) / took:.0%} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
