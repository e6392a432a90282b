"""Seconds from each fault of a node to the verdict that names it, by executor.

``python benchmarks/node_faults.py [FAULT ...]``, as root with Slurm and Ray (``make machines``), runs the tests of these faults
and writes their seconds to tests/machines/node_faults.json, where all others stay, and those of tests that failed.
``python -m tests.cli.generated`` then writes them into the table of docs/nodes.md. ``--junit FILE`` takes the seconds of tests
that ran before, with ``--junitxml=FILE -o junit_family=xunit1``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path

from machine import expect, measured_on  # type: ignore[import-not-found] # a script imports from its own directory

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.machines.node_faults import FAULTS, MEASURED  # noqa: E402

#: Faults with a limit of seconds.
TIMED = [name for name, fault in FAULTS.items() if fault.within]


def main() -> None:
    """Run the tests and write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--junit", type=Path, help="read this file, and run nothing")
    parser.add_argument("faults", nargs="*", default=TIMED, help=f"of {', '.join(TIMED)}; all")
    given = parser.parse_args()
    expect(parser, given.faults, TIMED)
    with tempfile.TemporaryDirectory() as directory:
        junit = given.junit or Path(directory, "junit.xml")
        if given.junit is None:
            chosen = " or ".join(f"{name}-" for name in given.faults)
            # Only that family has properties.
            options = [
                "-n",
                "0",
                "-m",
                "",
                "-k",
                chosen,
                f"--junitxml={junit}",
                "-o",
                "junit_family=xunit1",
            ]
            line = [sys.executable, "-m", "pytest", "tests/machines/test_node_faults.py", *options]
            subprocess.run(line, cwd=ROOT, check=False)
        measured = json.loads(MEASURED.read_text(encoding="utf-8"))
        passed = [case for case in ET.parse(junit).iter("testcase") if case.find("failure") is None]
        for found in (one for case in passed for one in case.iter("property")):
            name, executor = found.attrib["name"].split()
            if name in given.faults:
                measured["seconds"].setdefault(name, {})[executor] = float(found.attrib["value"])
    slurm = subprocess.run(
        ["slurmctld", "-V"], check=True, capture_output=True, text=True
    ).stdout.split()[-1]
    measured["on"] = f"{measured_on('torch', 'ray')}, Slurm {slurm}"
    MEASURED.write_text(f"{json.dumps(measured, indent=1)}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
