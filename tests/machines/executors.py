"""Two nodes by each executor, for faults of nodes: in network namespaces, with a disk of its own on the second one."""

from __future__ import annotations

import contextlib
import functools
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import psutil
from tests.machines.cluster import cluster, ray_cluster
from tests.machines.network import TOKEN, Network
from tests.pytest_runs import RECORDED


class Nodes:
    """Two nodes, ``n1`` with pytest and ``n2``, whose agents the executor ``local`` starts; others inherit from it."""

    name: ClassVar[str] = "local"

    def __init__(self, network: Network, directory: Path, *, number: int = 2, shared: bool = True) -> None:
        #: Of the nodes that come: 1 without n2.
        self.number = number
        self.network, self.directory = network, directory / "repository"
        #: What n2 has in place of the temporary directory of all.
        self.disk = directory / "disk"
        #: Where pytest has its temporary files, and whether both nodes see the same there.
        self.base, self._shared = self.directory / "temporary", shared
        # Of a short name: the sockets below another one would be elsewhere.
        self.temporary = Path(tempfile.mkdtemp(prefix="dc-", dir="/tmp"))
        for path in (self.directory, self.disk, self.base):
            path.mkdir()
        # The session's, and by their environment that of the agents.
        network.environment["TMPDIR"] = str(self.temporary)
        network.environment["PYTHONPATH"] += f":{self.temporary}/site"
        self._cluster = directory / "cluster"

    @contextlib.contextmanager
    def ready(self) -> Iterator[None]:
        """Start what the nodes need before a session does."""
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "none", str(self.disk)], check=True)
        (self.disk / "site").mkdir()
        self._cluster.mkdir()
        try:
            with self._started():
                try:
                    yield
                finally:
                    self.network.mend()
        finally:
            # Whoever still has it open must not keep it.
            subprocess.run(["umount", "--lazy", str(self.disk)], check=True)
            shutil.rmtree(self.temporary, ignore_errors=True)

    @contextlib.contextmanager
    def _started(self) -> Iterator[None]:
        yield

    def inside(self, node: str) -> list[str]:
        """Return the words before a command that run it on a node."""
        return self.network.inside(node, self._cluster, self.before(node))

    def before(self, node: str) -> str:
        """Return the command that gives n2 its own disk."""
        if node != "n2":
            return "true"
        own = f"mount --bind {self.disk} {self.temporary}"
        return own if self._shared else f"{own} && mount -t tmpfs none {self.base}"

    def session(self, *args: str) -> subprocess.Popen[str]:
        """Start a session on both nodes."""
        line = [sys.executable, "-m", "pytest", *RECORDED, "-p", "no:cacheprovider", "--distcompat-nodes=2"]
        line += [f"--distcompat-executor={self.name}", f"--basetemp={self.base / 'base'}", *self.options(), *args]
        return self.network.popen("n1", [*self.allocate(), *line], self.directory)

    def options(self) -> list[str]:
        """Return the executor's own options."""
        return []

    def allocate(self) -> list[str]:
        """Return what stands before the command of pytest."""
        return []

    def agent(self, node: str = "n2") -> psutil.Process:
        """Return the agent of a node."""
        (processes,) = [
            process
            for process in self._ours()
            if process.cmdline()[1:3] == ["-m", "pytest_distcompat.cli"] and self._is_of(node, process)
        ]
        return processes

    def take(self) -> None:
        """Let the scheduler end the agent of n2."""
        raise NotImplementedError

    def _is_of(self, node: str, process: psutil.Process) -> bool:
        return self.network.is_on(process, node)

    def _ours(self) -> Iterator[psutil.Process]:
        """Yield the processes of the session, on both nodes: those that work in its directory."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.cwd() == str(self.directory) and process.status() != psutil.STATUS_ZOMBIE:
                    yield process

    def left(self, *, files: bool = True) -> list[str]:
        """Return the commands of what a session left running, and its temporary files."""
        processes = [" ".join(process.cmdline()) for process in self._ours()]
        paths = [path for place in (self.disk, self.temporary) for path in place.glob("distcompat-*")]
        # The files by which sessions share a machine stay.
        return processes + [str(path) for path in paths if files and "leases" not in path.name]


class Local(Nodes):
    """Both agents on n1."""

    def _is_of(self, node: str, process: psutil.Process) -> bool:
        return process.cmdline()[-1] == node


class Join(Nodes):
    """The agent of n2 joins: twice where there are three nodes."""

    name = "join"

    def __init__(self, network: Network, directory: Path, *, number: int = 2, shared: bool = True) -> None:
        super().__init__(network, directory, number=number, shared=shared)
        self.joined: list[subprocess.Popen[str]] = []
        (self.directory / "token").write_text(TOKEN)

    def options(self) -> list[str]:
        return ["--distcompat-listen=10.97.0.1:29500", "--distcompat-token-file=token"]

    def session(self, *args: str) -> subprocess.Popen[str]:
        for _ in range(self.number - 1):
            self.joined.append(self.network.join(self.directory, self.before("n2")))
        return super().session(*args)


class Slurm(Nodes):
    """An allocation of two nodes."""

    name = "slurm"

    @contextlib.contextmanager
    def _started(self) -> Iterator[None]:
        with cluster(self.network.environment, self._cluster, self.inside) as environment:
            self.network.environment |= environment
            yield

    def allocate(self) -> list[str]:
        return ["salloc", "--quiet", f"--nodes={self.number}", f"--ntasks={self.number}"]

    def take(self) -> None:
        run = functools.partial(
            subprocess.run, env=self.network.environment, check=True, capture_output=True, text=True
        )
        steps = run([*self.inside("n1"), "squeue", "--steps", "--noheader", "--format=%i"]).stdout.split()
        # All nodes' agents are one step; the allocation itself has none.
        (step,) = [step for step in steps if step.rpartition(".")[2].isdecimal()]
        run([*self.inside("n1"), "scancel", step])


class Ray(Nodes):
    """A cluster of two nodes."""

    name = "ray"

    @contextlib.contextmanager
    def _started(self) -> Iterator[None]:
        with ray_cluster(self.network.environment, self._cluster, self.inside, self.number) as environment:
            self.network.environment |= environment
            yield

    def take(self) -> None:
        (daemon,) = [
            process
            for process in psutil.process_iter(["name"])
            if process.info["name"] == "raylet" and self.network.is_on(process, "n2")
        ]
        daemon.kill()


NODES: dict[str, type[Nodes]] = {executor.name: executor for executor in (Local, Join, Slurm, Ray)}
