"""Time and memory of simulating models with their real sizes at many ranks.

``python benchmarks/simulate.py --ranks 1024 [CELL ...]`` simulates Llama 3 70B under FSDP2, HSDP and TP x FSDP, and prints a
table. ``--driver Qwen235B --precision bf16_upcast`` does it with Qwen3-235B-A22B: torch's grouped product has no float32 without
values.
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
import time
from pathlib import Path

from machine import expect, measured_on  # type: ignore[import-not-found] # a script imports from its own directory

from pytest_distcompat import Cell
from pytest_distcompat.checks import find_check
from pytest_distcompat.engine import run_check
from pytest_distcompat.ext.simulation.launcher import SimulatingLauncher
from pytest_distcompat.runner import Runner

#: Options of the cells, by name.
CELLS: dict[str, dict[str, int]] = {"fsdp2": {}, "hsdp": {"dp_replicate": 2}, "tp": {"tp": 4}}
CHECKS = ("active", "names", "dtypes", "units", "memory")


def main() -> None:
    """Simulate each cell, judge it, and print a row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--driver", default="Llama70B", help="a class of large_models.py")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("cells", nargs="*", default=list(CELLS), help=f"of {', '.join(CELLS)}; all")
    arguments = parser.parse_args()
    expect(parser, arguments.cells, CELLS)
    print(measured_on("torch", "transformers"))
    print("| cell | ranks simulated | seconds | seconds of CPU | peak of a process | verdicts |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name in arguments.cells:
        cell = Cell.of("fsdp2", arguments.precision, arguments.ranks, **CELLS[name])
        with tempfile.TemporaryDirectory() as store:
            began, before = time.perf_counter(), os.times()
            runner = Runner(Path(store), SimulatingLauncher(), device="cpu", timeout=3600)
            found = [
                run_check(runner, f"large_models:{arguments.driver}", cell, find_check(name), ())
                for name in CHECKS
            ]
            after, took = os.times(), time.perf_counter() - began
        run = found[0][1].run()
        cpu = sum(used(after)) - sum(used(before))
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024**2
        words = ", ".join(sorted({f"{one.status.word} {one.why}".strip() for one, _ in found}))
        print(
            f"| {cell.id} | {len(run.at('build'))} | {took:.0f} | {cpu:.0f} | {peak:.1f} GiB | {words} |",
            flush=True,
        )


def used(times: os.times_result) -> tuple[float, ...]:
    """Return the seconds of CPU of this process and its children."""
    return times.user, times.system, times.children_user, times.children_system


if __name__ == "__main__":
    main()
