"""A Slurm, or a Ray cluster, with two nodes on this machine. Needs root."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from pytest_distcompat import clock

CONFIGURATION = """
ClusterName=distcompat
SlurmctldHost={hosts[0]}
SlurmctldPort={ports[0]}
SlurmUser=root
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/controller.pid
SlurmdPidFile={directory}/%n.pid
SlurmctldLogFile={directory}/controller.log
SlurmdLogFile={directory}/%n.log
AuthType=auth/munge
AuthInfo=socket={directory}/munge/socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
NodeName=n1 NodeHostname={hosts[0]} Port={ports[1]} CPUs=2 State=UNKNOWN
NodeName=n2 NodeHostname={hosts[1]} Port={ports[2]} CPUs=2 State=UNKNOWN
PartitionName=all Nodes=n1,n2 Default=YES State=UP PreemptMode=OFF
PartitionName=grace Nodes=n1,n2 State=UP PriorityTier=1 GraceTime=90
PartitionName=now Nodes=n1,n2 State=UP PriorityTier=1
PartitionName=high Nodes=n1,n2 State=UP PriorityTier=2 PreemptMode=OFF
"""


#: Returns the words before a command that runs it on a node.
Inside = Callable[[str], list[str]]


needs_slurm = pytest.mark.skipif(
    not shutil.which("slurmctld") or not shutil.which("munged") or os.getuid() != 0,
    reason="no Slurm and munge, or not root: make machines",
)
needs_ray = pytest.mark.skipif(not importlib.util.find_spec("ray"), reason="no Ray: make machines")


@contextlib.contextmanager
def cluster(environment: Mapping[str, str], directory: Path, inside: Inside | None = None) -> Iterator[dict[str, str]]:
    """Start a Slurm, and yield the environment in which its commands find it; end it afterwards.

    Both nodes are this host, unless ``inside`` says where ``n1`` and ``n2`` are.
    """
    for name in ("state", "spool-n1", "spool-n2", "munge"):
        (directory / name).mkdir()
    configuration = directory / "slurm.conf"
    host = os.uname().nodename.partition(".")[0]
    hosts = (host, host) if inside is None else ("n1", "n2")
    key = directory / "munge" / "key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    munge = ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={directory}/munge/socket"]
    munge += [f"--{kind}-file={directory}/munge/{kind}" for kind in ("log", "pid", "seed")]
    environment = {**environment, "SLURM_CONF": str(configuration)}
    lines = [("n1", munge), ("n1", ["slurmctld", "-D"])]
    lines += [(node, ["slurmd", "-D", "-N", node]) for node in ("n1", "n2")]
    where = inside or (lambda _: [])

    def idle() -> bool:
        line = [*where("n1"), "sinfo", "--noheader", "--format=%D %t"]
        return subprocess.run(line, env=environment, capture_output=True, text=True, check=False).stdout == "2 idle\n"

    for left in (2, 1, 0):
        configuration.write_text(CONFIGURATION.format(hosts=hosts, ports=_free_ports(3), directory=directory))
        with daemons([[*where(node), *line] for node, line in lines], environment, directory) as started:
            if _comes_up(idle, started):
                yield environment
                return
        assert left, _said_in(directory)


def _free_ports(number: int) -> list[int]:
    """Return free ports that no other process is given before the daemons listen there.

    The kernel gives ports of its own range to whoever asks for any, and the tests beside this one do.
    """
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    with contextlib.ExitStack() as stack:
        ports: list[int] = []
        while len(ports) < number:
            with contextlib.suppress(OSError):
                stack.enter_context(socket.create_server(("", port := random.randrange(10_000, lowest))))
                ports.append(port)
    return ports


def _comes_up(is_up: Callable[[], bool], started: Sequence[subprocess.Popen[bytes]]) -> bool:
    def settled() -> bool:
        return is_up() or any(process.poll() is not None for process in started)

    return clock.wait_until(settled, 60, every=0.5) and is_up()


def _said_in(directory: Path) -> str:
    """Return what each daemon of that directory said."""
    files = sorted([*directory.glob("*.out"), *directory.glob("*.log"), *directory.glob("munge/log")])
    return "\n".join(f"{file.name}:\n{file.read_text()}" for file in files)


@contextlib.contextmanager
def ray_cluster(
    environment: Mapping[str, str], directory: Path, inside: Inside, nodes: int = 2, *, dashboard: bool = False
) -> Iterator[dict[str, str]]:
    """Start a Ray cluster on ``n1`` and ``n2``, and yield the environment in which drivers on ``n1`` find it; end it afterwards.

    ``ray job`` needs the dashboard.
    """
    # The command is beside this interpreter, whether or not its virtual environment is active.
    path = os.pathsep.join((str(Path(sys.executable).parent), environment.get("PATH", os.defpath)))
    environment = {**environment, "PATH": path, "RAY_USAGE_STATS_ENABLED": "0", "RAY_ADDRESS": "10.97.0.1:6379"}
    least = ["--block", "--num-cpus=2", f"--object-store-memory={80 * 2**20}"]
    head = ["ray", "start", "--head", "--node-ip-address=10.97.0.1", "--port=6379", f"--include-dashboard={dashboard}"]
    node = ["ray", "start", "--address=10.97.0.1:6379", "--node-ip-address=10.97.0.2"]
    with contextlib.ExitStack() as stack:
        # The names of its sockets are long.
        head += [f"--temp-dir={stack.enter_context(tempfile.TemporaryDirectory(prefix='ray-', dir='/tmp'))}"]
        for number, line in enumerate((head, node)[:nodes], 1):
            own = directory / f"n{number}"
            own.mkdir()
            stack.enter_context(daemons([[*inside(own.name), *line, *least]], environment, own))
            out = own / "0.out"
            assert clock.wait_until(functools.partial(_has_started, out), 120, every=0.5), _said_in(own)
        yield environment


def _has_started(out: Path) -> bool:
    return "Ray runtime started" in out.read_text()


@contextlib.contextmanager
def daemons(
    lines: Sequence[Sequence[str]], environment: Mapping[str, str], directory: Path
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start them one after the other, with their output in files of that directory; end them afterwards."""
    started: list[subprocess.Popen[bytes]] = []
    try:
        for number, line in enumerate(lines):
            with (directory / f"{number}.out").open("wb") as out:
                started.append(subprocess.Popen(line, env=environment, stdout=out, stderr=out, cwd=directory))
            clock.sleep(1)
        yield started
    finally:
        for process in reversed(started):
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()
            process.wait()
