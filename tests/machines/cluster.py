"""A Slurm with two nodes on this machine. Needs root."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from pytest_distcompat import clock

CONFIGURATION = """
ClusterName=distcompat
SlurmctldHost={host}
SlurmctldPort=16917
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
NodeName=n1 NodeHostname={host} Port=17101 CPUs=2 State=UNKNOWN
NodeName=n2 NodeHostname={host} Port=17102 CPUs=2 State=UNKNOWN
PartitionName=all Nodes=n1,n2 Default=YES State=UP
"""


@contextlib.contextmanager
def cluster(environment: Mapping[str, str], directory: Path) -> Iterator[dict[str, str]]:
    """Start it, and yield the environment in which its commands find it; end it afterwards."""
    for name in ("state", "spool-n1", "spool-n2", "munge"):
        (directory / name).mkdir()
    configuration = directory / "slurm.conf"
    host = os.uname().nodename.partition(".")[0]
    configuration.write_text(CONFIGURATION.format(host=host, directory=directory))
    key = directory / "munge" / "key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    munge = ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={directory}/munge/socket"]
    munge += [f"--{kind}-file={directory}/munge/{kind}" for kind in ("log", "pid", "seed")]
    environment = {**environment, "SLURM_CONF": str(configuration)}
    lines = [munge, ["slurmctld", "-D"], ["slurmd", "-D", "-N", "n1"], ["slurmd", "-D", "-N", "n2"]]
    started: list[subprocess.Popen[bytes]] = []

    def idle() -> bool:
        line = ["sinfo", "--noheader", "--format=%D %t"]
        return subprocess.run(line, env=environment, capture_output=True, text=True, check=False).stdout == "2 idle\n"

    try:
        for line in lines:
            with (directory / f"{line[0]}-{line[-1]}.out".replace("/", "_")).open("wb") as out:
                started.append(subprocess.Popen(line, env=environment, stdout=out, stderr=out))
            clock.sleep(1)
        assert clock.wait_until(idle, 30, every=0.5), (directory / "controller.log").read_text()
        yield environment
    finally:
        for process in reversed(started):
            process.terminate()
            process.wait(20)
