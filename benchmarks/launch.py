"""What one distributed test costs: ours beside what users have today, on the same body, run side by side.

``python benchmarks/launch.py [--rounds 3] [--train] [--stack] [--modules N]`` prints a Markdown table. The body is an all_reduce
on 2 gloo ranks; with ``--train`` it is a step of AdamW under DistributedDataParallel, which imports a second of torch when
it first runs in a process; with ``--stack`` the ranks also have accelerate, transformers and deepspeed imported, as the tests
of a trainer do. ``--modules N`` times whole sessions instead, of N modules with 20 tests each, the start of pytest and of all
ranks included, for the ways in which ranks are kept. Every round runs every way once, so that a slow minute of the machine
hits all; a row's figure is the median over its tests of all rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from machine import PACKAGES, measured_on, needs  # type: ignore[import-not-found] # a script imports from its own directory
from multi_process import multi_process  # type: ignore[import-not-found] # a script imports from its own directory

STACK = "import accelerate\nimport transformers\nfrom transformers import Trainer\nimport deepspeed\n"

BODY = """
import torch
from torch import distributed
{imports}

def body():
    total = torch.ones(8)
    distributed.all_reduce(total)
    assert total.tolist() == [2.0] * 8
"""

TRAINING = """
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
{imports}

def body():
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    before = model.module.weight.detach().clone()
    model(torch.ones(2, 8) * (1 + distributed.get_rank())).sum().backward()
    optimizer.step()
    assert not torch.equal(model.module.weight, before)
"""

SCRIPT = """
from body import body
from torch import distributed

distributed.init_process_group("gloo")
body()
# A rank that is still in DistributedDataParallel's last collective when its peer leaves may abort.
distributed.barrier()
distributed.destroy_process_group()
"""

MARKED = """
import pytest
from body import body

@pytest.mark.distcompat(world_size=2)
@pytest.mark.parametrize("number", range({count}))
def test_body(process_group, number):
    body()
"""

CONTINUOUS = """
from body import body
from torch.testing._internal.common_distributed import MultiProcContinuousTest

class TestBody(MultiProcContinuousTest):
    world_size = 2

    @classmethod
    def backend_str(cls):
        return "gloo"

for number in range({count}):
    setattr(TestBody, f"test_{{number}}", lambda self: body())
    getattr(TestBody, f"test_{{number}}").__name__ = f"test_{{number}}"
"""


@dataclass
class Way:
    """One way to run the body: what it is called, how often a round, and what gives the seconds of each test."""

    name: str
    count: int
    measure: Callable[[Path, int], list[float]]


def environment() -> dict[str, str]:
    """One thread a rank for everybody, nothing printed that costs time, and no 5 s for a query that a name server dropped."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "DS_ACCELERATOR": "cpu",
        "PYTHONWARNINGS": "ignore",
        "RES_OPTIONS": "timeout:1 attempts:1",
    }


def run(command: list[str], where: Path) -> float:
    """Seconds of a whole command; the benchmark stops if it fails."""
    began = time.perf_counter()
    done = subprocess.run(command, cwd=where, env=environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return time.perf_counter() - began


def by_pytest(source: str, *options: str, first: bool = False) -> Callable[[Path, int], list[float]]:
    """Seconds of each test as pytest reports them, without the first, which pays for warming up (or only the first)."""

    def measure(where: Path, count: int) -> list[float]:
        (where / "test_it.py").write_text(source.format(count=count))
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml=junit.xml", *options]
        run([*command, "test_it.py"], where)
        seconds = [float(case.attrib["time"]) for case in ET.parse(where / "junit.xml").iter("testcase")]
        return seconds[:1] if first else seconds[1:]

    return measure


def by_command(*command: str) -> Callable[[Path, int], list[float]]:
    """Seconds of a whole command for each test."""

    def measure(where: Path, count: int) -> list[float]:
        (where / "script.py").write_text(SCRIPT)
        return [run([*command, "script.py"], where) for _ in range(count)]

    return measure


# --multi_gpu, on CPU too: it is the launcher that starts one process a rank (--cpu would start a single one).
LAUNCH = [
    sys.executable,
    "-m",
    "accelerate.commands.launch",
    "--multi_gpu",
    "--num_processes",
    "2",
    "--num_machines",
    "1",
]
WAYS = [
    Way("ours, fresh ranks each test", 40, by_pytest(MARKED)),
    Way("ours, ranks that tests share", 40, by_pytest(MARKED, "--distcompat-reuse=session")),
    Way("ours, the first test of a session", 1, by_pytest(MARKED, first=True)),
    Way("ours, `--distcompat-launcher torchrun`", 3, by_pytest(MARKED, "--distcompat-launcher=torchrun")),
    Way(
        "`torchrun`",
        2,
        by_command(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
    ),
    Way("`accelerate launch`", 2, by_command(*LAUNCH, "--mixed_precision", "no", "--dynamo_backend", "no")),
    Way("torch `MultiProcessTestCase`", 3, by_pytest(multi_process("from body import body", "body()"))),
    Way("torch `MultiProcContinuousTest` (ranks kept)", 20, by_pytest(CONTINUOUS)),
]


def session(source: str, *options: str) -> Callable[[Path, int], list[float]]:
    """Seconds of a whole pytest run on so many modules."""

    def measure(where: Path, count: int) -> list[float]:
        for number in range(count):
            (where / f"test_{number}.py").write_text(source.format(count=TESTS))
        return [run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, "."], where)]

    return measure


#: Tests of a module in a whole session.
TESTS = 20
SESSIONS = {
    "ours, ranks that tests of the session share": session(MARKED, "--distcompat-reuse=session"),
    "ours, ranks that tests of a module share": session(MARKED, "--distcompat-reuse=module"),
    "ours, fresh ranks each test": session(MARKED),
    "torch `MultiProcContinuousTest` (ranks kept for a class)": session(CONTINUOUS),
}


def table(seconds: dict[str, list[float]], counted: str = "tests", what: str = "seconds a test") -> list[str]:
    """Rows in Markdown, each with its ratio to the first way."""
    ours = statistics.median(next(iter(seconds.values())))
    lines = [f"| way | {counted} | {what} (median) | min to max | x ours |", "| --- | --- | --- | --- | --- |"]
    for name, found in seconds.items():
        median = statistics.median(found)
        spread = f"{min(found):.3f} to {max(found):.3f}"
        lines.append(f"| {name} | {len(found)} | {median:.3f} | {spread} | {median / ours:.1f} |")
    return lines


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--train", action="store_true", help="the body is a step of training")
    parser.add_argument(
        "--stack", action="store_true", help="import accelerate, transformers and deepspeed in the ranks"
    )
    parser.add_argument("--modules", type=int, default=0, help="time sessions of so many modules, ranks kept")
    arguments = parser.parse_args()
    needs(parser, "expecttest")
    sessions = [Way(name, arguments.modules, measure) for name, measure in SESSIONS.items()]
    ways = sessions if arguments.modules else WAYS
    seconds: dict[str, list[float]] = {way.name: [] for way in ways}
    for _ in range(arguments.rounds):
        for way in ways:
            with tempfile.TemporaryDirectory() as directory:
                where = Path(directory)
                body = TRAINING if arguments.train else BODY
                (where / "body.py").write_text(body.format(imports=STACK if arguments.stack else ""))
                # One more where the first is dropped, so that no way is left without a figure.
                seconds[way.name] += way.measure(where, way.count)
    print(f"{measured_on(*PACKAGES)}\n")
    whole = ("sessions", f"seconds of {arguments.modules} modules with {TESTS} tests") if arguments.modules else ()
    print("\n".join(table(seconds, *whole)))


if __name__ == "__main__":
    main()
