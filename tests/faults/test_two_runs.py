"""Several process groups at once, of one run of pytest and of two: never more ranks than there are slots for them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from itertools import accumulate, chain
from pathlib import Path

import psutil
import pytest
from tests.faults.conftest import held_leases

from pytest_distcompat.lease.inventory import SLOTS

pytestmark = pytest.mark.spawn

#: Each rank notes again and again that it lives: what is killed cannot note its end.
NOTING = """
import os
import time
from pathlib import Path
import pytest
import torch
from torch import distributed

@pytest.mark.parametrize("size", [pytest.param(size, marks=pytest.mark.distcompat(world_size=size)) for size in {sizes}])
def test_noted(process_group, rank, size, request):
    own = Path(f"{{request.node.name}}-{{rank}}.beats").open("a")
    for _ in range(15):
        print(time.monotonic(), file=own, flush=True)
        time.sleep(0.02)
    total = torch.ones(())
    distributed.all_reduce(total)
    assert total.item() == size
"""


class Machine:
    """Two cores, and a temporary directory, which runs of pytest share."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.temporary = directory / "tmp"
        self.temporary.mkdir()
        self.cores = set(sorted(os.sched_getaffinity(0))[:2])
        self.mark = uuid.uuid4().hex
        self.sessions: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, sizes: list[int], environment: dict[str, str], workers: int) -> None:
        """Start a run of tests of these sizes, on so many workers of xdist."""
        run_directory = self.directory / name
        run_directory.mkdir()
        (run_directory / "test_noting.py").write_text(NOTING.format(sizes=sizes), encoding="utf-8")
        self.sessions[name] = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "pytest",
                "-p",
                "no:randomly",
                "-v",
                "-n",
                str(workers),
                "--basetemp",
                str(run_directory / "base"),
            ],
            cwd=run_directory,
            env={**environment, "TMPDIR": str(self.temporary), "FAULTS_MARK": self.mark},
            stdout=(run_directory / "output.txt").open("wb"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: os.sched_setaffinity(0, self.cores),  # noqa: PLW1509 - no threads here
        )

    def out(self, name: str) -> str:
        return (self.directory / name / "output.txt").read_text(encoding="utf-8")

    def ranks_at_work(self, name: str = "*") -> list[tuple[float, float]]:
        """When ranks were there, from when to when."""
        beats = [path.read_text().splitlines() for path in self.directory.glob(f"{name}/*.beats")]
        return [(float(lines[0]), float(lines[-1])) for lines in beats if lines]

    def most(self) -> int:
        """How many ranks there were at once, at most."""
        changes = chain.from_iterable(((begin, 1), (end, -1)) for begin, end in self.ranks_at_work())
        return max(accumulate(change for _, change in sorted(changes)))

    def processes(self) -> list[psutil.Process]:
        """Return the processes of all runs that still run."""
        commands = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("FAULTS_MARK") == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    commands.append(process)
            except psutil.Error:
                pass
        return commands

    def await_nothing(self) -> None:
        """Until nothing runs, nobody holds slots and nobody waits. xdist's workers take some seconds to miss their pytest."""
        deadline = time.monotonic() + 20
        while left := [*map(str, self.processes()), *held_leases(self.temporary)]:
            assert time.monotonic() < deadline, left
            time.sleep(0.05)


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    made = Machine(tmp_path)
    yield made
    for process in made.processes():
        process.kill()
    for session in made.sessions.values():
        session.wait()


@pytest.mark.nightly
def test_two_runs_share_the_slots(machine: Machine, environment: dict[str, str]) -> None:
    for name in ("one", "other"):
        machine.start(name, [2] * 6, environment, workers=2)
    for name, run in machine.sessions.items():
        assert run.wait(120) == 0, machine.out(name)
    assert len(machine.ranks_at_work()) == 2 * 6 * 2
    assert 2 < machine.most() <= SLOTS * len(machine.cores) or len(machine.cores) == 1
    machine.await_nothing()


@pytest.mark.nightly
def test_the_slots_of_a_killed_session_go_to_the_other(machine: Machine, environment: dict[str, str]) -> None:
    for name in ("one", "other"):
        machine.start(name, [2] * 6, environment, workers=2)
    deadline = time.monotonic() + 60
    while not machine.ranks_at_work("one"):
        assert time.monotonic() < deadline, machine.out("one")
        time.sleep(0.02)
    machine.sessions["one"].send_signal(signal.SIGKILL)
    assert machine.sessions["other"].wait(120) == 0, machine.out("other")
    assert machine.sessions["one"].wait(1) == -signal.SIGKILL
    assert len(machine.ranks_at_work("other")) == 6 * 2
    assert machine.most() <= SLOTS * len(machine.cores)
    machine.await_nothing()


@pytest.mark.nightly
def test_more_workers_than_slots(machine: Machine, environment: dict[str, str]) -> None:
    sizes = [2, 4, 2, 2, 4, 2, 4, 4, 2, 2]
    machine.start("one", sizes, environment, workers=6)
    assert machine.sessions["one"].wait(200) == 0, machine.out("one")
    assert len(machine.ranks_at_work()) == sum(sizes)
    assert machine.most() <= SLOTS * len(machine.cores)
    machine.await_nothing()
