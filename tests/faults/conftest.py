"""Run faulty tests in a pytest of their own; read how each ended, and find leftover processes, files and leases."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import psutil
import pytest
from tests.faults.forms import Form, forms
from tests.faults.runs import Run
from tests.pytest_runs import RECORDED, reports, temporaries

from pytest_distcompat.lease import Inventory, Pool
from pytest_distcompat.lease.directory import LeaseDirectory
from pytest_distcompat.lease.tickets import Queue

HERE = Path(__file__).parent
SHARED_MEMORY = Path("/dev/shm")


class Faulty:
    """A pytest that runs faulty tests, in a directory, an environment and a temporary directory of its own."""

    def __init__(
        self, directory: Path, args: Sequence[str], environment: Mapping[str, str], wrap: Sequence[str]
    ) -> None:
        self.directory = directory
        self._world_size = int(environment.get("FAULTS_WORLD_SIZE", "0"))
        self._mark = uuid.uuid4().hex
        self._before = _names(SHARED_MEMORY)
        self.temporary = directory / "temporary"
        self.temporary.mkdir(exist_ok=True)
        private = private_shared_memory()
        command = [*private, *wrap, sys.executable, "-m", "pytest", *RECORDED, "-v"]
        if "--basetemp" not in args:
            command += ["--basetemp", str(directory / "basetemp")]
        command += args
        own = {
            "TMPDIR": str(self.temporary),
            "RECORDED_PROCESSES": "yes",
            "RECORDED_REPORTS": str(directory / "reports.jsonl"),
            "FAULTS_MARK": self._mark,
        }
        self._output = (directory / "output.txt").open("w", encoding="utf-8")
        self.process = subprocess.Popen(
            command,
            cwd=directory,
            env={**environment, **own},
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._shared = _open_shared_memory(self.process) if private else None

    def wait_for(self, *names: str) -> None:
        """Wait until the tests have written these files into the directory."""
        files = [self.directory / name for name in names]
        deadline = time.monotonic() + 60
        while not all(file.exists() for file in files):
            assert time.monotonic() < deadline, self.out
            assert self.process.poll() is None, self.out
            time.sleep(0.02)

    @property
    def out(self) -> str:
        return (self.directory / "output.txt").read_text(encoding="utf-8", errors="replace")

    def finish(self, seconds: float = 150.0, *, killed: bool = False, grace: float = 5.0) -> Run:
        """Wait for its end, and then ``grace`` seconds for the end of all that it started.

        A process that is ``killed`` cannot remove its temporary files.
        """
        try:
            code = self.process.wait(seconds)
        finally:
            self._output.close()
            self.kill()
        left = tuple(self._leftovers(grace, killed=killed))
        return Run(code, self.out, self.directory, reports(self.directory), left, self._world_size)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def _leftovers(self, grace: float, *, killed: bool) -> list[str]:
        """Return leftover processes, shared memory, leases and temporary files, after some time to go away by themselves."""
        deadline = time.monotonic() + grace
        while (left := self._current_leftovers(killed=killed)) and time.monotonic() < deadline:
            time.sleep(0.1)
        for process in self._processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        return left

    def _current_leftovers(self, *, killed: bool) -> list[str]:
        left = [f"process {process.pid} {process.name()}" for process in self._processes()]
        if self._shared:
            shared = _names(self._shared)
        else:
            # Other processes use this directory too: only new files that nobody has mapped count.
            shared = _names(SHARED_MEMORY) - self._before - _mapped()
        left += [f"shared memory {name}" for name in sorted(shared)]
        left += held_leases(self.temporary)
        # The files by which runs share a machine stay too.
        temporary = sorted(name for name in temporaries(self.temporary) if not name.startswith("distcompat-leases"))
        return left if killed else left + [f"temporary {name}" for name in temporary]

    def _processes(self) -> list[psutil.Process]:
        """Return the processes that inherited our mark, whatever their parent is by now."""
        processes = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("FAULTS_MARK") == self._mark and process.status() != psutil.STATUS_ZOMBIE:
                    processes.append(process)
        return processes


def held_leases(temporary: Path) -> list[str]:
    """Return the leased devices below that temporary directory with their holders, and the waiting requests."""
    remaining = []
    for leases in temporary.glob("distcompat-leases-*"):
        ids = tuple(sorted(unquote(lock.stem) for lock in leases.glob("*.lock")))
        holders = Pool(leases, Inventory("gpu", ids)).holders() if ids else []
        remaining += [f"lease of {holder.id} by {holder.who}" for holder in holders]
        remaining += [f"{ticket.who} in the queue for leases" for ticket in Queue(LeaseDirectory(leases)).waiting()]
    return remaining


def _names(directory: Path | int) -> set[str]:
    return {entry.name for entry in os.scandir(directory)}


@functools.cache
def private_shared_memory() -> list[str]:
    """Return a command prefix for a private /dev/shm; empty where that is not allowed."""
    script = 'mount -t tmpfs none /dev/shm && exec "$@"'
    prefix = ["unshare", "--mount", "sh", "-c", script, "sh"]
    with contextlib.suppress(OSError):
        if subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode == 0:
            return prefix
    return []


def _open_shared_memory(process: subprocess.Popen[bytes]) -> int:
    """Open the private /dev/shm of that process, so that it can be read after the process has ended."""
    deadline = time.monotonic() + 10
    private = Path(f"/proc/{process.pid}/root/dev/shm")
    while private.stat().st_dev == SHARED_MEMORY.stat().st_dev:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return os.open(private, os.O_RDONLY | os.O_DIRECTORY)


def _mapped() -> set[str]:
    """Return the files in shared memory that any process has mapped."""
    files = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            lines = maps.read_text(encoding="utf-8", errors="replace").splitlines()
            files |= {Path(line.split()[5]).name for line in lines if " /dev/shm/" in line}
    return files


Start = Callable[..., Faulty]
RunFaults = Callable[..., Run]


@pytest.fixture(scope="session")
def environment(environment: dict[str, str]) -> dict[str, str]:
    """Add to the environment the modules that the faults import."""
    for module in (HERE / "faults_group.py", HERE / "faults_forked.py", HERE.parent / "plugin" / "adopter.py"):
        importable = Path(environment["PYTHONPATH"], "tests", module.parent.name)
        importable.mkdir(exist_ok=True)
        shutil.copy(module, importable)
    return environment


@pytest.fixture(scope="session")
def start(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Start pytest on ``bodies``, a file beside this one, or on source text; ``wrap`` stands before its command.

    Its directories are below one of that name. ``conftest`` is another file beside this one.
    """
    started: list[Faulty] = []

    def start(
        bodies: str, *args: str, wrap: Sequence[str] = (), name: str = "faulty", conftest: str = "", **changed: str
    ) -> Faulty:
        directory = tmp_path_factory.mktemp(name)
        if conftest:
            shutil.copy(HERE / conftest, directory / "conftest.py")
        if "\n" in bodies:
            (directory / "test_faulty.py").write_text(bodies, encoding="utf-8")
        else:
            shutil.copy(HERE / bodies, directory / f"test_{bodies.removeprefix('faults_')}")
        faulty = Faulty(directory, args, {**environment, **changed}, wrap)
        started.append(faulty)
        return faulty

    yield start
    for faulty in started:
        faulty.kill()


@pytest.fixture(scope="session")
def run_faults(start: Start) -> RunFaults:
    """Run pytest once per set of arguments and wait for its end.

    In random order a module's fixtures are made again whenever the parameter of one of them changes.
    """
    done: dict[str, Run] = {}

    def run(bodies: str, *args: str, seconds: float = 150.0, **more: Any) -> Run:
        key = repr((bodies, args, more))
        if key not in done:
            done[key] = start(bodies, *args, **more).finish(seconds)
        return done[key]

    return run


@pytest.fixture(scope="module", params=forms("alone", "workers", "reused", "alone at 4", "reused at 4"))
def form(request: pytest.FixtureRequest) -> Form:
    parameter: Form = request.param
    return parameter


@pytest.fixture(autouse=True)
def _interruptible(interruptible: None) -> None:
    """Some of these tests interrupt what they started."""
