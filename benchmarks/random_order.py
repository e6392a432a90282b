"""Whether a verdict of our own tests depends on their order or on chance: the whole suite, again and again, shuffled.

``python benchmarks/random_order.py [--runs 10] [--seed 1] [--reports DIR] [-- PYTEST OPTIONS]`` runs what ``make test``
runs, modules and the tests in them in another random order each time (pytest-random-order, of the group ``bench``), and
prints a line of a Markdown table for each run: its seed, by which ``--random-order-seed`` repeats it, what came of it, and
what failed; the messages are in the run's JUnit file, if those are kept. Each run has a temporary directory of its own:
files that the plugin leaves there are reported too, and processes that still run. (A torchrun or a browser that a test has
killed leaves files as well.) It exits with 1 if anything failed or remains.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from pathlib import Path

import psutil
from machine import PACKAGES, measured_on, needs  # type: ignore[import-not-found] # a script imports from its own directory

ROOT = Path(__file__).parents[1]
#: What of ours is in a temporary directory and must not stay; the files of leases do on purpose.
OURS = ("distcompat-", ".distcompat-", "pymp-", "pytorch-errorfile-")
ORDINARY = ("tests", "-n", "2", "--dist", "loadscope", "-m", "not nightly")


def run(seed: int, reports: Path, options: list[str]) -> tuple[str, list[str]]:
    """One run: its line of the table, the tests that failed, and what was left behind."""
    report = reports / f"{seed}.xml"
    shuffled = ["--random-order", f"--random-order-seed={seed}", f"--junitxml={report}"]
    command = [sys.executable, "-m", "pytest", "-q", *ORDINARY, *shuffled, *options]
    began = time.monotonic()
    # Of a short name: some tests make sockets below it.
    with tempfile.TemporaryDirectory(prefix="ro-") as temporary:
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TMPDIR": temporary}
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
        left = sorted(path.name for path in Path(temporary).iterdir() if path.name.startswith(OURS))
        left = [name for name in left if not name.startswith("distcompat-leases-")]
        left += _processes(temporary)
    seconds = time.monotonic() - began
    if not report.exists():
        raise SystemExit(
            f"pytest ended with {done.returncode} and no report:\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        )
    cases = list(ET.parse(report).iter("testcase"))
    bad = [
        case for case in cases if case.find("failure") is not None or case.find("error") is not None
    ]
    skipped = sum(case.find("skipped") is not None for case in cases)
    failed = [f"{case.attrib['classname']}::{case.attrib['name']}" for case in bad]
    if done.returncode and not failed:
        failed = [f"pytest ended with exit code {done.returncode}"]
    failed += [f"left behind: {name}" for name in left]
    words = "<br>".join(f"`{name}`" for name in failed)
    passed = len(cases) - skipped - len(bad)
    return f"| {seed} | {passed} | {skipped} | {len(bad)} | {seconds / 60:.1f} | {words} |", failed


def _processes(temporary: str) -> list[str]:
    """Those that still run and have that temporary directory: they were started for the run."""
    found = []
    for process in psutil.process_iter():
        # Another user's, or one that ended just now.
        with contextlib.suppress(psutil.Error):
            if (
                process.environ().get("TMPDIR") == temporary
                and process.status() != psutil.STATUS_ZOMBIE
            ):
                found.append(f"process {process.name()}")
    return found


def main() -> None:
    """Run, print, and say by the exit code whether all runs passed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument(
        "--seed", type=int, default=1, help="of the first run; the next one's is one more"
    )
    parser.add_argument(
        "--reports",
        type=Path,
        help="directory for each run's JUnit file, SEED.xml (default: not kept)",
    )
    parser.add_argument("options", nargs="*", help="more for pytest, after --")
    given = parser.parse_args()
    needs(parser, "random_order")
    print(f"{measured_on(*PACKAGES, 'pytest')}\n")
    print(
        "| seed | passed | skipped | failed | minutes | which |\n| --- | --- | --- | --- | --- | --- |"
    )
    worst: list[str] = []
    with tempfile.TemporaryDirectory(prefix="random-order-") as directory:
        reports = (given.reports or Path(directory)).resolve()
        reports.mkdir(parents=True, exist_ok=True)
        for seed in range(given.seed, given.seed + given.runs):
            line, failed = run(seed, reports, given.options)
            print(line, flush=True)
            worst += failed
    if worst:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
