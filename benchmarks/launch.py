"""What one distributed test costs: ours beside what users have today, on the same body, run side by side.

``python benchmarks/launch.py [--rounds 3] [--train] [--stack] [--modules N] [--ours] [--device cuda]`` prints a Markdown table,
with ``--ours`` of our ways alone. The body is an all_reduce on 2 gloo ranks, or on one NCCL rank a GPU, at most 2; with
``--train`` it is a step of AdamW under
DistributedDataParallel, which imports a second of torch when it first runs in a process; with ``--stack`` the ranks also have
accelerate, transformers and deepspeed imported, as the tests of a trainer do. ``--modules N`` times whole sessions instead, of
N modules with 20 tests each, the start of pytest and of all ranks included, for the ways in which ranks are kept. Every round
runs every way once, so that a slow minute of the machine hits all; a row's figure is the median over its tests of all rounds.
``--device cuda`` also times the steps of one rank's life, and ``--json FILE`` writes all figures. Each way is said on standard
error when it has run, and its figures are in the file from then on: a benchmark that is stopped loses nothing but the way that
runs.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
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

from pytest_distcompat.devices import CPU_WORLD_SIZE, visible_gpus

#: The names of our ways begin so.
OURS = "ours, "
STACK = (
    "import accelerate\nimport transformers\nfrom transformers import Trainer\nimport deepspeed\n"
)

BODY = """
import torch
from torch import distributed
{imports}

def body():
    total = torch.ones(8, device={device})
    distributed.all_reduce(total)
    assert total.tolist() == [distributed.get_world_size()] * 8
"""

TRAINING = """
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
{imports}

def body():
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(8, 1).to({device}))
    optimizer = torch.optim.AdamW(model.parameters())
    before = model.module.weight.detach().clone()
    model(torch.ones(2, 8, device={device}) * (1 + distributed.get_rank())).sum().backward()
    optimizer.step()
    assert not torch.equal(model.module.weight, before)
"""

SCRIPT = """
import os

# accelerate launch starts a single process without them.
alone = {{"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533"}}
for name in alone.keys() - os.environ.keys():
    os.environ[name] = alone[name]

from body import body
from torch import distributed

distributed.init_process_group("{backend}")
body()
# A rank that is still in DistributedDataParallel's last collective when its peer leaves may abort.
distributed.barrier()
distributed.destroy_process_group()
"""

MARKED = """
import pytest
from body import body

@pytest.mark.distcompat(world_size={ranks})
@pytest.mark.parametrize("number", range({count}))
def test_body(process_group, number):
    body()
"""

CONTINUOUS = """
from body import body
from torch.testing._internal.common_distributed import MultiProcContinuousTest

class TestBody(MultiProcContinuousTest):
    world_size = {ranks}

    @classmethod
    def backend_str(cls):
        return "{backend}"

for number in range({count}):
    setattr(TestBody, f"test_{{number}}", lambda self: body())
    getattr(TestBody, f"test_{{number}}").__name__ = f"test_{{number}}"
"""


#: The steps of one rank's life, in seconds each.
STEPS = """
import json, os, sys, time
began = time.perf_counter()
seconds = {}

def step(name):
    global began
    seconds[name] = time.perf_counter() - began
    began = time.perf_counter()

import torch
step("import torch")
torch.cuda.set_device(0)
torch.ones(1, device="cuda").item()
step("CUDA context, first kernel")
from torch import distributed
store = distributed.TCPStore("127.0.0.1", 0, 1, is_master=True)
distributed.init_process_group("nccl", store=store, rank=0, world_size=1)
step("init_process_group")
total = torch.ones(8, device="cuda")
distributed.all_reduce(total)
torch.cuda.synchronize()
step("first all_reduce, NCCL communicator")
distributed.all_reduce(total)
torch.cuda.synchronize()
step("second all_reduce")
distributed.destroy_process_group()
step("destroy_process_group")
print(json.dumps(seconds))
"""


@dataclass(frozen=True)
class Group:
    """What the body runs on."""

    device: str
    ranks: int

    @property
    def fields(self) -> dict[str, str]:
        """Return the fields of the templates."""
        place = "f'cuda:{distributed.get_rank()}'" if self.device == "cuda" else "'cpu'"
        return {
            "device": place,
            "backend": "nccl" if self.device == "cuda" else "gloo",
            "ranks": str(self.ranks),
        }


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
        "PYTHONWARNINGS": "ignore",
        "RES_OPTIONS": "timeout:1 attempts:1",
    }


def run(command: list[str], where: Path) -> float:
    """Seconds of a whole command; the benchmark stops if it fails."""
    began = time.perf_counter()
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, cwd=where, env=environment(), stdout=pipe, stderr=pipe, text=True
    ) as process:
        try:
            output, errors = process.communicate()
        except BaseException:
            # Not SIGKILL, after which torchrun would leave its ranks behind.
            process.terminate()
            raise
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{output[-3000:]}\n{errors[-3000:]}")
    return time.perf_counter() - began


def by_pytest(
    source: str, group: Group, *options: str, first: bool = False
) -> Callable[[Path, int], list[float]]:
    """Seconds of each test as pytest reports them, without the first, which pays for warming up (or only the first)."""

    def measure(where: Path, count: int) -> list[float]:
        (where / "test_it.py").write_text(source.format(count=count, **group.fields))
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "--junitxml=junit.xml",
            *options,
        ]
        run([*command, "test_it.py"], where)
        seconds = [
            float(case.attrib["time"]) for case in ET.parse(where / "junit.xml").iter("testcase")
        ]
        return seconds[:1] if first else seconds[1:]

    return measure


def by_command(group: Group, *command: str) -> Callable[[Path, int], list[float]]:
    """Seconds of a whole command for each test."""

    def measure(where: Path, count: int) -> list[float]:
        (where / "script.py").write_text(SCRIPT.format(**group.fields))
        return [run([*command, "script.py"], where) for _ in range(count)]

    return measure


def ways(group: Group) -> list[Way]:
    """The ways to run the body on such a group."""
    ranks = str(group.ranks)
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        ranks,
    ]
    # --multi_gpu, on CPU too: it is the launcher that starts one process a rank (--cpu would start a single one), and refuses
    # to start a single one.
    several = ["--multi_gpu"] if group.ranks > 1 else []
    launch = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        *several,
        "--num_processes",
        ranks,
        "--num_machines",
        "1",
    ]
    case = multi_process(
        "from body import body", "body()", backend=group.fields["backend"], ranks=group.ranks
    )
    return [
        Way("ours, fresh ranks each test", 40, by_pytest(MARKED, group)),
        Way(
            "ours, ranks that tests share",
            40,
            by_pytest(MARKED, group, "--distcompat-reuse=session"),
        ),
        Way("ours, the first test of a session", 1, by_pytest(MARKED, group, first=True)),
        Way(
            "ours, `--distcompat-launcher torchrun`",
            3,
            by_pytest(MARKED, group, "--distcompat-launcher=torchrun"),
        ),
        Way("`torchrun`", 2, by_command(group, *torchrun)),
        Way(
            "`accelerate launch`",
            2,
            by_command(group, *launch, "--mixed_precision", "no", "--dynamo_backend", "no"),
        ),
        Way("torch `MultiProcessTestCase`", 3, by_pytest(case, group)),
        Way("torch `MultiProcContinuousTest` (ranks kept)", 20, by_pytest(CONTINUOUS, group)),
    ]


def session(source: str, group: Group, *options: str) -> Callable[[Path, int], list[float]]:
    """Seconds of a whole pytest run on so many modules."""

    def measure(where: Path, count: int) -> list[float]:
        for number in range(count):
            (where / f"test_{number}.py").write_text(source.format(count=TESTS, **group.fields))
        return [
            run(
                [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, "."],
                where,
            )
        ]

    return measure


#: Tests of a module in a whole session.
TESTS = 20


def sessions(group: Group) -> dict[str, Callable[[Path, int], list[float]]]:
    """The ways in which ranks are kept."""
    return {
        "ours, ranks that tests of the session share": session(
            MARKED, group, "--distcompat-reuse=session"
        ),
        "ours, ranks that tests of a module share": session(
            MARKED, group, "--distcompat-reuse=module"
        ),
        "ours, fresh ranks each test": session(MARKED, group),
        "torch `MultiProcContinuousTest` (ranks kept for a class)": session(CONTINUOUS, group),
    }


def steps() -> dict[str, float]:
    """Seconds of each step of one rank's life on the GPU, the second time, when its files are in memory."""
    command = [sys.executable, "-c", STEPS]
    outputs = [
        subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    found: dict[str, float] = json.loads(outputs[-1].stdout.splitlines()[-1])
    return found


@dataclass
class Figures:
    """What has been measured so far, in seconds."""

    group: Group
    path: Path | None
    seconds: dict[str, list[float]]
    steps: dict[str, float]

    def write(self) -> None:
        """Write all figures to the file, if there is one."""
        if self.path is not None:
            written = {
                "ranks": self.group.ranks,
                "device": self.group.device,
                "seconds": self.seconds,
            }
            self.path.write_text(json.dumps({**written, "steps": self.steps}), encoding="utf-8")

    @property
    def measured(self) -> dict[str, list[float]]:
        """The ways that have run at least once."""
        return {name: found for name, found in self.seconds.items() if found}


def stop(*_: object) -> None:
    """End the benchmark as Ctrl-C does, so that what is measured is printed."""
    raise KeyboardInterrupt


def measure_all(chosen: list[Way], figures: Figures, rounds: int, body: str) -> None:
    """Run every way once in each round; write and say what each took."""
    for number in range(1, rounds + 1):
        for way in chosen:
            with tempfile.TemporaryDirectory() as directory:
                where = Path(directory)
                (where / "body.py").write_text(body)
                # One more where the first is dropped, so that no way is left without a figure.
                took = way.measure(where, way.count)
            figures.seconds[way.name] += took
            figures.write()
            print(
                f"round {number}: {way.name}: {statistics.median(took):.3f} s",
                file=sys.stderr,
                flush=True,
            )


def table(
    seconds: dict[str, list[float]], counted: str = "tests", what: str = "seconds a test"
) -> list[str]:
    """Rows in Markdown, each with its ratio to the first way."""
    ours = statistics.median(next(iter(seconds.values())))
    lines = [
        f"| way | {counted} | {what} (median) | min to max | x ours |",
        "| --- | --- | --- | --- | --- |",
    ]
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
        "--stack",
        action="store_true",
        help="import accelerate, transformers and deepspeed in the ranks",
    )
    parser.add_argument(
        "--modules", type=int, default=0, help="time sessions of so many modules, ranks kept"
    )
    parser.add_argument("--ours", action="store_true", help="time our ways alone")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    needs(parser, "expecttest")
    if arguments.device == "cuda" and not visible_gpus():
        parser.error("no GPU is visible")
    if arguments.device == "cpu":
        # Everybody's: of the commands that we compare with, too.
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    group = Group(arguments.device, min(visible_gpus(), CPU_WORLD_SIZE) or CPU_WORLD_SIZE)
    kept = [Way(name, arguments.modules, measure) for name, measure in sessions(group).items()]
    chosen = kept if arguments.modules else ways(group)
    if arguments.ours:
        chosen = [way for way in chosen if way.name.startswith(OURS)]
    figures = Figures(group, arguments.json, {way.name: [] for way in chosen}, {})
    imports = STACK if arguments.stack else ""
    body = (TRAINING if arguments.train else BODY).format(imports=imports, **group.fields)
    signal.signal(signal.SIGTERM, stop)
    stopped = False
    try:
        if arguments.device == "cuda":
            figures.steps = steps()
            figures.write()
        measure_all(chosen, figures, arguments.rounds, body)
    except KeyboardInterrupt:
        stopped = True
    whole = (
        ("sessions", f"seconds of {arguments.modules} modules with {TESTS} tests")
        if arguments.modules
        else ()
    )
    print(f"{measured_on(*PACKAGES)}, {group.ranks} {group.fields['backend']} ranks\n")
    if figures.measured:
        print("\n".join(table(figures.measured, *whole)))
    if figures.steps:
        print("\n| step of a rank | seconds |\n| --- | --- |")
        print("\n".join(f"| {name} | {took:.3f} |" for name, took in figures.steps.items()))
    if stopped:
        raise SystemExit("stopped: these are the figures so far")


if __name__ == "__main__":
    main()
