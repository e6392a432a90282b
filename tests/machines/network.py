"""Nodes on this machine with a network of their own: a namespace each, and a bridge between them. Needs root."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import pytest

TOKEN = "0123456789abcdef0123456789abcdef"

needs_namespaces = pytest.mark.skipif(
    not shutil.which("ip") or not shutil.which("tc") or os.getuid() != 0,
    reason="no iproute2, or not root: make machines",
)


def ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True, capture_output=True, text=True)


class Network:
    """Two nodes, ``n1`` with 10.97.0.1 and ``n2`` with 10.97.0.2; nothing leads out of it."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._id = secrets.token_hex(3)
        self.environment = dict(environment)
        self.namespaces = {name: f"dc{self._id}{name}" for name in ("n1", "n2")}
        # The bridge is in a namespace too, so that no address of this machine can be reached.
        self.switch = f"dc{self._id}sw"
        self.started: list[subprocess.Popen[str]] = []

    def make(self) -> None:
        ip("netns", "add", self.switch)
        ip("-n", self.switch, "link", "add", "br0", "type", "bridge")
        ip("-n", self.switch, "link", "set", "br0", "up")
        for number, namespace in enumerate(self.namespaces.values(), 1):
            ip("netns", "add", namespace)
            ip("-n", namespace, "link", "set", "lo", "up")
            line = f"link add eth0 netns {namespace} type veth peer name port{number} netns {self.switch}"
            ip(*line.split())
            ip("-n", self.switch, "link", "set", f"port{number}", "master", "br0", "up")
            ip("-n", namespace, "address", "add", f"10.97.0.{number}/24", "dev", "eth0")
            ip("-n", namespace, "link", "set", "eth0", "up")

    def remove(self) -> None:
        for running in psutil.process_iter():
            if self.is_on(running, *self.namespaces):
                with contextlib.suppress(psutil.NoSuchProcess):
                    running.kill()
        for process in self.started:
            process.communicate()
        for namespace in (*self.namespaces.values(), self.switch):
            ip("netns", "delete", namespace)

    def cut(self) -> None:
        """Cut the link of n2: nothing is refused, nothing arrives."""
        ip("-n", self.switch, "link", "set", "port2", "nomaster")

    def mend(self) -> None:
        ip("-n", self.switch, "link", "set", "port2", "master", "br0")

    def slow(self) -> None:
        """Let 8 Mbit a second through, and drop what has to wait for more than 20 ms."""
        for namespace in self.namespaces.values():
            line = "qdisc add dev eth0 root tbf rate 8mbit burst 16kb latency 20ms"
            subprocess.run(["tc", "-n", namespace, *line.split()], check=True)

    def inside(self, node: str, directory: Path, before: str = "true") -> list[str]:
        """Return the words before a command that run it on that node; ``before`` runs first in its mount namespace."""
        hosts = directory / "hosts"
        hosts.write_text("127.0.0.1 localhost\n::1 localhost\n10.97.0.1 n1\n10.97.0.2 n2\n")
        script = f'hostname {node} && mount --bind {hosts} /etc/hosts && {before} && exec "$@"'
        # Not ``ip netns exec``, which hides /sys/fs/cgroup.
        line = f"nsenter --net=/run/netns/{self.namespaces[node]} unshare --uts --mount sh -c"
        return [*line.split(), script, "sh"]

    def popen(self, node: str, line: list[str], directory: Path, before: str = "true") -> subprocess.Popen[str]:
        """Start a command on that node, whose host name is the node's."""
        environment = {
            **self.environment,
            "GLOO_SOCKET_IFNAME": "eth0",
            "RECORDED_REPORTS": str(directory / "reports.jsonl"),
        }
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        line = [*self.inside(node, directory, before), *line]
        process: subprocess.Popen[str] = subprocess.Popen(line, cwd=directory, env=environment, **pipes)  # type: ignore[call-overload]
        self.started.append(process)
        return process

    def join(self, directory: Path, before: str = "true", name: str = "n2", node: str = "n2") -> subprocess.Popen[str]:
        """Start a node agent on n2."""
        (directory / "token").write_text(TOKEN)
        line = [sys.executable, "-m", "pytest_distcompat.cli", "join", "10.97.0.1:29500", "--token-file", "token"]
        return self.popen(node, [*line, "--name", name], directory, before)

    def pytest(self, directory: Path, *args: str, recorded: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        """Start a session on n1, which n2 can join."""
        line = [sys.executable, "-m", "pytest", *recorded, "-p", "no:cacheprovider", "--distcompat-executor", "join"]
        line += ["--distcompat-listen", "10.97.0.1:29500", "--distcompat-token-file", "token"]
        (directory / "temporary").mkdir(exist_ok=True)
        return self.popen("n1", [*line, f"--basetemp={directory / 'temporary' / 'base'}", *args], directory)

    def is_on(self, process: psutil.Process, *nodes: str) -> bool:
        """Tell whether a process runs on one of these nodes."""
        inodes = {Path("/run/netns", self.namespaces[node]).stat().st_ino for node in nodes}
        with contextlib.suppress(OSError):
            return Path(f"/proc/{process.pid}/ns/net").stat().st_ino in inodes
        return False

    def listens(self, process: psutil.Process, node: str) -> bool:
        """Tell whether a process of that node listens on a port."""
        line = ["ip", "netns", "exec", self.namespaces[node], "ss", "-ltnpH"]
        return f"pid={process.pid}," in subprocess.run(line, check=True, capture_output=True, text=True).stdout

    def left(self) -> list[str]:
        """Return the commands of processes that still run on one of the nodes."""
        processes = (process for process in psutil.process_iter(["cmdline"]) if self.is_on(process, *self.namespaces))
        return [" ".join(process.info["cmdline"]) for process in processes]


@pytest.fixture
def network(environment: dict[str, str]) -> Iterator[Network]:
    network = Network(environment)
    network.make()
    yield network
    network.remove()
