"""Machine and environment, and what in them makes runs fail or ignore their settings.

``distcompat doctor`` (``cli.doctor``) calls the functions of this module and prints what they
return. ``this_machine`` and ``torch_infos`` collect facts, ``findings`` says what is wrong with
them. A *finding* is a line such as::

    warning: /dev/shm has 64 MiB free; ranks share memory there: docker run --shm-size=1g, ...

A *rank* is a process of a torchrun process group, which trains a model together with other ranks.
No rank is started for this.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest_distcompat.devices import gpu_uuids, visible_ids
from pytest_distcompat.installed import has_compiler
from pytest_distcompat.launch import loopback, nccl

#: The file system in memory where NCCL, and DeepSpeed on the CPU, share memory between ranks.
SHM = Path("/dev/shm")  # noqa: S108 - only inspected
#: The free bytes that it needs: 256 MiB, more than docker's default of 64 MiB. See
#: https://docs.docker.com/reference/cli/docker/container/run/#shm-size
LEAST_SHM = 256 << 20
#: The free bytes that the directory for temporary files needs: 2 GiB. A session of the default
#: profile keeps checkpoints of some hundreds of MiB, until pytest removes them.
LEAST_TMP = 2 << 30
#: The file with the names of addresses, read before a name server is asked.
HOSTS = Path("/etc/hosts")
#: The time limit for the import of torch, in seconds.
IMPORT_TIMEOUT_S = 300.0
#: How long this machine's name may take to resolve, in seconds. A name server that drops queries
#: takes ten and more.
RESOLVE_TIMEOUT_S = 2.0

#: Variables by which a trainer takes its process for a rank.
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
#: Variables by which accelerate decides, whatever a trainer's own settings are.
LAUNCHER_VARIABLES = (
    "ACCELERATE_USE_FSDP",
    "ACCELERATE_USE_DEEPSPEED",
    "ACCELERATE_MIXED_PRECISION",
    "ACCELERATE_USE_CPU",
)


@dataclass(frozen=True)
class Finding:
    """Something that is wrong with the machine or its packages, or may be."""

    #: ``problem`` (runs fail, or differ from their settings), ``warning`` or ``note``.
    level: str
    #: What is wrong and, if that is known, how to mend it.
    text: str


@dataclass(frozen=True)
class Machine:
    """Facts about the machine."""

    #: The environment variables.
    environ: Mapping[str, str]
    #: What ``torch_infos`` returned; empty if it was not called.
    torch: Mapping[str, Any] = field(default_factory=dict)
    #: The UUIDs of all GPUs of the machine.
    gpus: tuple[str, ...] = ()
    #: The UUIDs of those that CUDA would show a process, by CUDA_VISIBLE_DEVICES.
    visible: tuple[str, ...] = ()
    #: The CPU cores that this process may use.
    cores: int = 1
    #: The free bytes of ``SHM``; None if it does not exist.
    shm: int | None = None
    #: The free bytes of the directory for temporary files; None if it does not exist.
    tmp: int | None = None
    #: The name of this machine.
    hostname: str = ""
    #: Whether that name has an address within ``RESOLVE_TIMEOUT_S``.
    resolves: bool = True
    #: Whether ``HOSTS`` names ::1, see ``names_loopback``.
    loopback: bool = True
    #: Why ranks cannot meet at localhost; empty if they can.
    unreachable: str = ""
    #: Whether there is a C++ compiler.
    compiler: bool = True
    #: The NCCL that ranks load; None without one.
    nccl: nccl.Library | None = None

    @property
    def device(self) -> str:
        """Return the default device of runs: ``cuda`` or ``cpu``."""
        return "cuda" if self.visible else "cpu"


def this_machine() -> Machine:
    """Return the facts about this machine, all but those about torch.

    These need a second process, which ``doctor`` starts at the same time.
    """
    name = socket.gethostname()
    hosts = ""
    if HOSTS.exists():
        hosts = HOSTS.read_text(encoding="utf-8", errors="replace")
    return Machine(
        environ=dict(os.environ),
        gpus=tuple(gpu_uuids()),
        visible=tuple(visible_ids()),
        cores=len(os.sched_getaffinity(0)),
        shm=_free(SHM),
        tmp=_free(Path(tempfile.gettempdir())),
        hostname=name,
        resolves=_resolves(name),
        loopback=names_loopback(hosts),
        unreachable=loopback.problem(),
        compiler=has_compiler(),
        nccl=nccl.library(),
    )


def torch_infos() -> dict[str, Any]:
    """Return facts about torch, for ``Machine.torch``.

    A process of its own imports torch. The import may crash or hang, and this process is fast
    without it.

    Returns:
        What ``torch_facts.infos`` says: ``cuda``, ``hip`` and ``nccl`` (versions, or empty),
        ``gpus`` (the names of usable GPUs), ``has_nccl`` and ``gloo`` (whether torch has them). Or
        only ``error``, if torch cannot be imported.
    """
    command = [sys.executable, "-m", "pytest_distcompat.cli.torch_facts"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=IMPORT_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"torch was not imported within {IMPORT_TIMEOUT_S:g} s"}
    if done.returncode:
        # The last line of a traceback: the exception.
        errors = done.stderr.strip().splitlines()
        if errors:
            return {"error": errors[-1]}
        return {"error": f"the process that imports torch ended with exit code {done.returncode}"}
    # Libraries may have printed something at their import.
    last_line = done.stdout.splitlines()[-1]
    infos: dict[str, Any] = json.loads(last_line)
    return infos


def names_loopback(hosts: str) -> bool:
    """Tell whether the text of ``/etc/hosts`` has ``::1`` as an address of ``localhost``.

    torch's store looks for an IPv6 address of localhost first. Without one it takes
    ``::ffff:127.0.0.1``, which no such file has, and asks a name server for the name of every
    address that connects.
    """
    for line in hosts.splitlines():
        text, _, _comment = line.partition("#")
        words = text.split()
        if words and words[0] == "::1" and "localhost" in words[1:]:
            return True
    return False


def _free(directory: Path) -> int | None:
    """Return the free bytes of a directory's file system; None if there is no such directory."""
    with contextlib.suppress(OSError):
        return shutil.disk_usage(directory).free
    return None


def _resolves(name: str) -> bool:
    """Tell whether the name of a machine has an address within ``RESOLVE_TIMEOUT_S``."""
    resolved = threading.Event()

    def resolve() -> None:
        with contextlib.suppress(OSError):
            socket.getaddrinfo(name, None)
            resolved.set()

    # Nothing ends a query that a name server drops, so the process does not wait for this thread.
    query = threading.Thread(target=resolve, daemon=True)
    query.start()
    query.join(RESOLVE_TIMEOUT_S)
    return resolved.is_set()


def findings(machine: Machine) -> Iterator[Finding]:
    """Yield what is wrong with the machine, or may be.

    Nothing is said about torch and GPUs if ``machine.torch`` is empty.
    """
    error = machine.torch.get("error", "")
    # If it is not installed, the findings about packages say so.
    if error and "No module named 'torch'" not in error:
        yield Finding("problem", f"torch cannot be imported: {error}")
    if machine.torch and not error:
        yield from _gpu_findings(machine)
        if not machine.torch["gloo"]:
            yield Finding(
                "problem", "this torch has no gloo, without which no ranks meet on the CPU"
            )
    yield from _environment_findings(machine)
    yield from _system_findings(machine)


def _gpu_findings(machine: Machine) -> Iterator[Finding]:
    """Yield what keeps torch from using the GPUs of this machine."""
    torch = machine.torch
    # Such as ``0,1``; None shows all GPUs, an empty text none.
    selection = machine.environ.get("CUDA_VISIBLE_DEVICES")
    count = len(machine.gpus)
    if count and not (torch["cuda"] or torch["hip"]):
        yield Finding(
            "problem",
            f"{count} GPUs are here, and this torch is built for the CPU only: "
            "install one for CUDA",
        )
    elif machine.visible and not torch["gpus"]:
        yield Finding(
            "problem",
            "torch cannot use the GPUs (torch.cuda.is_available() is False): "
            "is the driver too old?",
        )
    elif len(machine.visible) != len(torch["gpus"]):
        yield Finding(
            "warning",
            f"{len(machine.visible)} GPUs are visible, and torch sees {len(torch['gpus'])}",
        )
    if machine.visible and torch["gpus"] and not torch["has_nccl"]:
        yield Finding("problem", "this torch has no NCCL, without which no ranks meet on GPUs")
    if not count or selection is None:
        return
    if not selection.strip():
        yield Finding(
            "warning",
            f"CUDA_VISIBLE_DEVICES is empty: none of {count} GPUs is used, runs are on the CPU",
        )
        return
    visible = len(machine.visible)
    if visible < len(selection.split(",")):
        problem = f"CUDA_VISIBLE_DEVICES={selection} names what is not here, or one GPU twice"
        yield Finding("problem", f"{problem}: CUDA shows {visible} of {count} GPUs")


def _environment_findings(machine: Machine) -> Iterator[Finding]:
    """Yield the environment variables that change what runs do."""
    environ = machine.environ
    threads = environ.get("OMP_NUM_THREADS", "")
    # Half of the cores: already two ranks with so many threads each use all of them.
    most_threads = max(1, machine.cores // 2)
    if threads.isdecimal() and int(threads) > most_threads:
        yield Finding(
            "warning",
            f"OMP_NUM_THREADS={threads}: each rank starts so many threads, "
            f"and there are {machine.cores} cores. torchrun takes 1 where it is not set",
        )
    rank_variables = [name for name in RANK_VARIABLES if name in environ]
    if rank_variables:
        yield Finding(
            "warning",
            f"{', '.join(rank_variables)}: set as for a rank of a process group; "
            "a trainer takes itself for one",
        )
    overriding = []
    for name in LAUNCHER_VARIABLES:
        if name in environ:
            overriding.append(f"{name}={environ[name]}")
    if overriding:
        yield Finding(
            "warning",
            f"{', '.join(overriding)}: "
            "accelerate obeys the environment before your trainer's settings",
        )
    offline = []
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"):
        if environ.get(name):
            offline.append(name)
    if offline:
        problem = f"{', '.join(offline)}: nothing is downloaded"
        yield Finding(
            "note",
            f"{problem}; what your own trainer loads must be in the cache "
            "(the built-in models need nothing)",
        )


def _system_findings(machine: Machine) -> Iterator[Finding]:
    """Yield what is wrong with memory, disk, network and compiler."""
    if machine.shm is None or machine.shm < LEAST_SHM:
        size = "is not there"
        if machine.shm is not None:
            size = f"has {machine.shm >> 20} MiB free"
        yield Finding(
            "warning",
            f"{SHM} {size}; ranks share memory there: docker run --shm-size=1g, or --ipc=host",
        )
    if machine.tmp is not None and machine.tmp < LEAST_TMP:
        problem = f"{tempfile.gettempdir()} has {machine.tmp >> 20} MiB free"
        yield Finding(
            "warning", f"{problem}; checkpoints are kept there: set TMPDIR, or --basetemp"
        )
    if not machine.resolves:
        yield Finding(
            "warning",
            f"the name of this machine, {machine.hostname}, does not resolve "
            f"within {RESOLVE_TIMEOUT_S:g} s: gloo may wait for it, or fail; "
            "add it to /etc/hosts or set GLOO_SOCKET_IFNAME",
        )
    if machine.unreachable:
        yield Finding("problem", machine.unreachable)
    if not machine.loopback:
        yield Finding(
            "warning",
            f"{HOSTS} does not name ::1: torch's store asks a name server who 127.0.0.1 is, "
            "for each rank of each group, and one that drops a query costs 5 s; "
            f"add '::1 localhost' to {HOSTS}",
        )
    if not machine.compiler:
        yield Finding(
            "warning",
            "there is no C++ compiler: inductor (compile) and DeepSpeed's offload cannot be run",
        )
