"""What people's harnesses make of a faulty test, ours beside them, on the same bodies: verdict, cause, seconds, left-overs.

``python benchmarks/faults.py [--limit 5] [FAULT ...]`` prints a Markdown table, two gloo ranks each. A sound test comes first, so
that no way pays for its start in the test that is looked at. A verdict is right if that test fails and the sound one passes;
the cause is shown if the output names it (``CAUSES``). Seconds are those of the faulty test as pytest reports them, or until the
benchmark ended it all. Left: processes alive when the harness is done. The exit code is 1 where ours is wrong, names no cause,
leaves something, or takes longer than the limit and 5 s.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
import uuid
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from pathlib import Path

import psutil
from machine import expect, measured_on, needs  # type: ignore[import-not-found] # a script imports from its own directory
from multi_process import multi_process  # type: ignore[import-not-found] # a script imports from its own directory

BODIES = """
import ctypes, os, signal, sys, time
import torch
from torch import distributed

def meet():
    distributed.all_reduce(torch.ones(2))

def well(rank):
    meet()

def raises(rank):
    if rank == 1:
        raise ValueError("the cause")
    meet()

def unpicklable(rank):
    class Local(Exception):
        pass
    if rank == 1:
        raise Local("the cause", lambda: None)
    meet()

def exits_0(rank):
    if rank == 1:
        os._exit(0)
    meet()

def exits_3(rank):
    if rank == 1:
        sys.exit(3)
    meet()

def killed(rank):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    meet()

def segfault(rank):
    if rank == 1:
        ctypes.string_at(0)
    meet()

def asleep(rank):
    if rank == 1:
        fall_asleep()
    meet()

def fall_asleep():
    time.sleep(600)

def loops(rank):
    if rank == 1:
        spin()
    meet()

def spin():
    while True:
        pass

def another_collective(rank):
    if rank == 1:
        distributed.barrier()
    meet()

def exits_0_alone(rank):
    if rank == 1:
        os._exit(0)

def killed_alone(rank):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)

def skips(rank):
    import unittest
    if rank == 1:
        raise unittest.SkipTest("not here")
"""

#: Of each body: what the output has to say, so that its reader knows the cause.
CAUSES = {
    "raises": r"ValueError: the cause",
    "unpicklable": r"Local: .*the cause",
    "exits_0": r"(?i)(rank|process) 1 (exited|terminated)|rank +: 1 ",
    "exits_3": r"(?i)(rank|process) 1 (failed: SystemExit|exited|terminated)|rank +: 1 ",
    "killed": r"SIGKILL|-9\b|signal 9",
    "segfault": r"(?i)SIGSEGV|segmentation fault|-11\b|signal 11",
    "asleep": r"fall_asleep",
    "loops": r"spin",
    "another_collective": r"barrier.*all_?reduce|all_?reduce.*barrier",
    "exits_0_alone": r"(?i)(rank|process) 1 (exited|terminated)|rank +: 1 ",
    "killed_alone": r"SIGKILL|-9\b|signal 9",
    "skips": r"not here",
}

MARKED = """
import pytest
import bodies

pytestmark = pytest.mark.distcompat(world_size=2, timeout={limit}, reuse="{reuse}")

def test_well(rank, process_group):
    bodies.well(rank)

def test_body(rank, process_group):
    bodies.{body}(rank)
"""

SCRIPT = """
import os
import sys
import bodies
from torch import distributed

distributed.init_process_group("gloo")
getattr(bodies, sys.argv[1])(int(os.environ["RANK"]))
distributed.destroy_process_group()
"""

COLD = """
import subprocess
import sys
import pytest

@pytest.mark.parametrize("body", ["well", "{body}"])
def test_body(body):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "script.py", body]
    {call}
"""
TORCHRUN = COLD.replace("{call}", "subprocess.run(command, check=True, timeout={limit} + 5)")
ACCELERATE = COLD.replace(
    "import pytest\n",
    "import pytest\nfrom accelerate.test_utils.testing import execute_subprocess_async\n",
).replace("{call}", "execute_subprocess_async(command, timeout={limit} + 5)")

#: Its time limit is 300 s, but for the tests that a table of its own names.
MULTI_PROCESS = multi_process(
    'import bodies\ncommon_distributed.TIMEOUT_OVERRIDE["test_1"] = {limit} + 5',
    'getattr(bodies, ["well", "{body}"][int(self._testMethodName[-1])])(self.rank)',
    "2",
)

CONTINUOUS = """
from datetime import timedelta
import bodies
from torch.testing._internal.common_distributed import MultiProcContinuousTest

class TestBody(MultiProcContinuousTest):
    world_size = 2
    timeout = timedelta(seconds={limit} + 5)

    @classmethod
    def backend_str(cls):
        return "gloo"

    def test_a_sound_one(self):
        bodies.well(self.rank)

    def test_body(self):
        bodies.{body}(self.rank)
"""

#: A test module for each way; cold ones get 5 seconds more, for their imports.
WAYS = {
    "ours": MARKED.replace("{reuse}", "never"),
    "ours, ranks that tests share": MARKED.replace("{reuse}", "session"),
    "`subprocess.run(torchrun)`": TORCHRUN,
    "accelerate `execute_subprocess_async`": ACCELERATE,
    "torch `MultiProcessTestCase`": MULTI_PROCESS,
    "torch `MultiProcContinuousTest`": CONTINUOUS,
}


@dataclass(frozen=True)
class Found:
    """What a harness made of a fault."""

    right: bool
    cause: bool
    seconds: float
    left: int

    def good_within(self, seconds: float) -> bool:
        """Whether nothing is wrong with it."""
        return self.right and self.cause and not self.left and self.seconds <= seconds

    def __str__(self) -> str:
        verdict = ("✓✓" if self.cause else "✓") if self.right else "✗"
        left = f" ({self.left})" if self.left else ""
        return f"{verdict} {self.seconds:.1f}{left}"


def run(way: str, body: str, limit: float) -> Found:
    """One fault in a pytest of its own; what it leaves is found by its environment, and killed."""
    mark = uuid.uuid4().hex
    environment = {
        **os.environ,
        "BENCHMARK_MARK": mark,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    with tempfile.TemporaryDirectory() as directory:
        here = Path(directory)
        # So that ours waits for no lease of another run.
        environment["TMPDIR"] = directory
        (here / "bodies.py").write_text(BODIES, encoding="utf-8")
        (here / "script.py").write_text(SCRIPT, encoding="utf-8")
        (here / "test_body.py").write_text(
            WAYS[way].format(body=body, limit=limit), encoding="utf-8"
        )
        plugins = ["-p", "no:randomly", "-p", "no:cacheprovider"]
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            *plugins,
            "--junitxml=junit.xml",
            "test_body.py",
        ]
        began = time.monotonic()
        with (here / "output").open("wb") as output, contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(
                command,
                cwd=here,
                env=environment,
                stdout=output,
                stderr=output,
                check=False,
                timeout=60,
            )
        seconds = reported(here / "junit.xml") or time.monotonic() - began
        text = (here / "output").read_text(encoding="utf-8", errors="replace")
        left = remaining(mark)
    return Found("1 failed, 1 passed" in text, bool(re.search(CAUSES[body], text)), seconds, left)


def reported(junit: Path) -> float:
    """The seconds of the last test; 0 if pytest did not get to write its report."""
    if not junit.exists():
        return 0.0
    return [float(case.attrib["time"]) for case in ET.parse(junit).iter("testcase")][-1]


def remaining(mark: str) -> int:
    """How many processes with that mark are still there a second later; they are killed."""
    time.sleep(1)
    found = 0
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if (
                process.environ().get("BENCHMARK_MARK") == mark
                and process.status() != psutil.STATUS_ZOMBIE
            ):
                found += 1
                process.kill()
    return found


def main() -> None:
    """Print the table, a row a fault."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", type=float, default=5.0, help="seconds after which a test hangs")
    parser.add_argument(
        "faults", nargs="*", default=list(CAUSES), help=f"of {', '.join(CAUSES)}; all"
    )
    given = parser.parse_args()
    expect(parser, given.faults, CAUSES)
    needs(parser, "expecttest")
    print(f"{measured_on('torch', 'accelerate', 'pytest')}; a test hangs after {given.limit:g} s\n")
    print("| rank 1 |", " | ".join(WAYS), "|")
    print("| --- |", " | ".join("---" for _ in WAYS), "|")
    bad = []
    for body in given.faults:
        row = {way: run(way, body, given.limit) for way in WAYS}
        print(f"| {body} |", " | ".join(map(str, row.values())), "|", flush=True)
        bad += [
            f"{body}: {way}: {found}"
            for way, found in row.items()
            if way.startswith("ours") and not found.good_within(given.limit + 5)
        ]
    if bad:
        raise SystemExit("\n".join(["", *bad]))


if __name__ == "__main__":
    main()
