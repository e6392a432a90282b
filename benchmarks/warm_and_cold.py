"""Verdicts on warm ranks beside those of the same tests under torchrun: the built-in suite, and all faults of ``tests/faults``.

``python benchmarks/warm_and_cold.py [--reports DIR] [PART ...]`` runs each part in two sessions, by
``--distcompat-launcher=warm`` and ``torchrun``, and prints a line of a Markdown table for it. Parts are the drivers of the
built-in suite, in the profile ``smoke``, and the faults by name: ``die`` is ``tests/faults/faults_die.py``. Below the table
stands each test whose verdicts differ. The exit code is 1 if there is one. A test under torchrun takes some 10 s.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from pathlib import Path

from machine import PACKAGES, expect, measured_on  # type: ignore[import-not-found] # a script imports from its own directory

ROOT = Path(__file__).parents[1]
SUITE = ("--pyargs", "pytest_distcompat.suite", "--distcompat-profile=smoke", "-n", "2")
#: By file of faults: options. The time limit is that of tests that have none of their own.
FAULTS: Mapping[str, tuple[str, ...]] = {
    "die": ("--distcompat-timeout=30", "-k", "not out_of_memory"),  # which needs a control group
    "hang": ("--distcompat-timeout=60",),
    "midway": ("--distcompat-timeout=60",),
    "output": ("--distcompat-timeout=60",),
    "raise": ("--distcompat-timeout=60",),
    "skip": ("--distcompat-timeout=60",),
    "state": ("--distcompat-timeout=240",),  # one builds an operator of DeepSpeed's
    "suite": ("--distcompat-timeout=30", "-k", "names or resume"),
}
DRIVERS = {
    name: (*SUITE, "-k", f"test{name}") for name in ("torch", "accelerate", "trainer", "deepspeed")
}
PARTS: Mapping[str, tuple[str, ...]] = {**DRIVERS, **FAULTS}


def run(part: str, launcher: str, reports: Path) -> tuple[dict[str, str], float]:
    """Run a part in a session of its own: its verdicts by test, and the seconds it took."""
    report = reports / f"{part}-{launcher}.xml"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:randomly",
        *PARTS[part],
    ]
    command += ["--distcompat-gpus=0", f"--distcompat-launcher={launcher}", f"--junitxml={report}"]
    began = time.monotonic()
    # Of a short name: some tests make sockets below it.
    with tempfile.TemporaryDirectory(prefix="wc-") as directory:
        if part in FAULTS:
            shutil.copy(
                ROOT / "tests" / "faults" / f"faults_{part}.py", Path(directory, f"test_{part}.py")
            )
        own = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "FAULTS_WORLD_SIZE": "2"}
        done = subprocess.run(
            [*command, f"--basetemp={directory}/t"],
            cwd=directory,
            env={
                **os.environ,
                **own,
                "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])),
            },
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
    if not report.exists():
        raise SystemExit(
            f"pytest ended with {done.returncode} and no report:\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        )
    return verdicts(report), time.monotonic() - began


def verdicts(report: Path) -> dict[str, str]:
    """Read a JUnit file: the status of a suite's check, pytest's outcome of any other test."""
    found = {}
    for case in ET.parse(report).iter("testcase"):
        bad = next(
            (tag for tag in ("error", "failure", "skipped") if case.find(tag) is not None), "passed"
        )
        skipped = case.find("skipped")
        if bad == "skipped" and skipped is not None and skipped.get("type") == "pytest.xfail":
            bad = "xfailed"
        status = case.find("properties/property[@name='distcompat_status']")
        name = f"{case.get('classname')}::{case.get('name')}"
        found[name] = str(status.get("value")) if status is not None else bad
    return found


def main() -> None:
    """Run, print, and say by the exit code whether all verdicts are equal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--reports",
        type=Path,
        help="directory for the JUnit files, PART-LAUNCHER.xml (default: not kept)",
    )
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"some of {', '.join(PARTS)} (default: all)"
    )
    given = parser.parse_args()
    expect(parser, given.parts, PARTS)
    print(f"{measured_on(*PACKAGES, 'pytest')}\n")
    print(
        "| part | verdicts | not green | differ | warm, s | torchrun, s |\n| --- | --- | --- | --- | --- | --- |"
    )
    differing: list[str] = []
    with tempfile.TemporaryDirectory(prefix="warm-cold-") as directory:
        reports = (given.reports or Path(directory)).resolve()
        reports.mkdir(parents=True, exist_ok=True)
        for part in given.parts or PARTS:
            warm, warm_seconds = run(part, "warm", reports)
            cold, cold_seconds = run(part, "torchrun", reports)
            names = [name for name in {**warm, **cold} if warm.get(name) != cold.get(name)]
            bad = sum(end != "passed" for end in warm.values())
            print(
                f"| {part} | {len(warm)} | {bad} | {len(names)} | {warm_seconds:.0f} | {cold_seconds:.0f} |",
                flush=True,
            )
            differing += [
                f"- `{name}`: {warm.get(name, 'nothing')} warm, {cold.get(name, 'nothing')} under torchrun"
                for name in names
            ]
    if differing:
        raise SystemExit("\n" + "\n".join(differing))


if __name__ == "__main__":
    main()
