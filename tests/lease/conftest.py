"""A pool on made-up devices, and processes that contend for it."""

from __future__ import annotations

import contextlib
import json
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from pytest_distcompat.lease import Inventory, Lease, Pool

#: When a test gives up, in seconds. Nothing here takes a second; a loaded machine may.
DEADLINE = 60.0
IDS = ("GPU-a", "GPU-b", "GPU-c", "GPU-d")


class Contender:
    """A process that leases devices by commands on its standard input (contender.py)."""

    def __init__(self, directory: Path, timeline: Path, who: str, ids: Sequence[str], places: int = 1) -> None:
        self.who = who
        self.process = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("contender.py"), directory, timeline, who, str(places), *ids],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def send(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")

    def receive(self) -> list[str]:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], DEADLINE)
        assert ready, f"{self.who} printed nothing"
        return self.process.stdout.readline().split()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@dataclass
class Field:
    """The pool that processes contend for, its timeline, and the other processes."""

    pool: Pool
    directory: Path
    timeline: Path
    contenders: list[Contender] = field(default_factory=list)

    def enter(self, *who: str, ids: Sequence[str] = IDS, places: int = 1) -> list[Contender]:
        """Start processes and wait until they are ready. With ``places`` so many ranks of their runs share a GPU."""
        new = [Contender(self.directory, self.timeline, name, ids, places) for name in who]
        self.contenders += new
        for contender in new:
            assert contender.receive() == ["ready"]
        return new

    def await_waiting(self, *who: str) -> None:
        """Until these, in this order, are who waits."""
        await_that(lambda: [ticket.who for ticket in self.pool._queue.waiting()], list(who))

    def await_held(self, *ids: str) -> None:
        """Until these are what somebody holds, be it for a lease that has not yet begun."""
        await_that(lambda: [holder.id for holder in self.pool.holders()], list(ids))


def await_that(read: Callable[[], object], expected: object) -> None:
    """Look until it is so."""
    deadline = time.monotonic() + DEADLINE
    while (value := read()) != expected:
        assert time.monotonic() < deadline, f"{value}, not {expected}"
        time.sleep(0.005)


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Field]:
    directory, timeline = tmp_path / "leases", tmp_path / "timeline"
    made = Field(Pool(directory, Inventory("gpu", IDS), timeline=timeline), directory, timeline)
    yield made
    for contender in made.contenders:
        contender.kill()
        for pipe in (contender.process.stdin, contender.process.stdout):
            with contextlib.suppress(BrokenPipeError):
                assert pipe is not None
                pipe.close()


#: From arguments of pytest to what it printed.
RunOnGpus = Callable[..., pytest.RunResult]


@pytest.fixture
def run_on_gpus(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> RunOnGpus:
    """Run pytest on 8 made-up GPUs (stand_in.py); ``script`` says how long ranks take, and what they leave."""
    for name in ("CUDA_VISIBLE_DEVICES", "PYTEST_ADDOPTS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    # Leases of its own.
    monkeypatch.setenv("TMPDIR", str(pytester.mkdir("tmp")))

    def run(*args: str, script: Mapping[str, Mapping[str, float]] | None = None) -> pytest.RunResult:
        (pytester.path / "script.json").write_text(json.dumps(script or {}), encoding="utf-8")
        return pytester.runpytest_subprocess("-p", "stand_in", "-p", "no:randomly", "--basetemp=base", *args)

    return run


@dataclass
class MadeUpMemory:
    """Memory of made-up GPUs: ``now`` in bytes; each look takes the next of what is ``to_come``."""

    now: dict[str, int]
    to_come: list[dict[str, int]] = field(default_factory=list)

    def __call__(self, ids: Sequence[str]) -> Mapping[str, int]:
        if self.to_come:
            self.now = {**self.now, **self.to_come.pop(0)}
        return {name: self.now[name] for name in ids if name in self.now}


@pytest.fixture
def memory() -> MadeUpMemory:
    return MadeUpMemory(dict.fromkeys(IDS, 1 << 30))


@contextlib.contextmanager
def lease_elsewhere(pool: Pool, ranks: int, who: str) -> Iterator[Lease]:
    """Lease in a thread of its own, to which nothing is lent yet."""
    with ThreadPoolExecutor(1) as thread, contextlib.ExitStack() as leases:
        lease = thread.submit(leases.enter_context, pool.lease(ranks, who=who, timeout=0)).result()
        try:
            yield lease
        finally:
            thread.submit(leases.close).result()
