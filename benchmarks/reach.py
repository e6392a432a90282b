"""What ``--distcompat-reach`` costs: the seconds of a suite's runs with and without it, by turns.

``python benchmarks/reach.py [--driver accelerate] [--rounds 3]`` runs the smoke profile of a built-in driver on the CPU. The map
is written at the end of a session, and takes as long whatever ran.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from machine import PACKAGES, expect, measured_on  # type: ignore[import-not-found] # a script imports from its own directory

DRIVERS = ("torch", "accelerate", "trainer", "deepspeed")


@dataclass(frozen=True)
class Session:
    """Seconds of a session from start to end, and of its runs without what comes before and after them."""

    whole: float
    runs: float


def once(driver: str, directory: Path, *options: str) -> Session:
    """Run the smoke profile of that driver."""
    report = directory / "report.json"
    profile = [
        "--distcompat-profile",
        "smoke",
        "--distcompat-drivers",
        driver,
        "--distcompat-gpus",
        "0",
    ]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--pyargs",
        "pytest_distcompat.suite",
        "-q",
        "-p",
        "no:cacheprovider",
    ]
    began = time.perf_counter()
    subprocess.run(
        [*command, *profile, "--distcompat-report", str(report), *options],
        cwd=directory,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    whole = time.perf_counter() - began
    runs = json.loads(report.read_text(encoding="utf-8"))["runs"]
    return Session(whole, sum(run["seconds"] for run in runs))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--driver", default="accelerate")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    expect(parser, [given.driver], DRIVERS)
    plain: list[Session] = []
    traced: list[Session] = []
    with tempfile.TemporaryDirectory() as name:
        for _ in range(given.rounds):
            plain.append(once(given.driver, Path(name)))
            traced.append(once(given.driver, Path(name), "--distcompat-reach", "reach.sqlite"))
    print(
        f"{measured_on(*PACKAGES, 'coverage')}; smoke of {given.driver}, {given.rounds} rounds by turns, medians\n"
    )
    print("| | seconds of the runs | of the session |\n| --- | --- | --- |")
    for title, sessions in (("without", plain), ("with --distcompat-reach", traced)):
        runs = statistics.median(session.runs for session in sessions)
        whole = statistics.median(session.whole for session in sessions)
        print(f"| {title} | {runs:.1f} | {whole:.1f} |")
    ratios = [after.runs / before.runs for before, after in zip(plain, traced, strict=True)]
    print(
        f"\nruns take {statistics.median(ratios):.2f} times as long ({min(ratios):.2f} to {max(ratios):.2f})"
    )


if __name__ == "__main__":
    main()
