"""Locks of builds of torch's extensions, C++ or CUDA code that is compiled at its first use.

A killed build leaves its lock, and all later builds wait for it for ever. So the watchdog calls
``remove_abandoned`` after each run that failed, since it may have killed a rank that built. If a
rank hung because it waited for a build, ``describe_locks`` says in the report which process builds.

A lock is an empty file ``lock`` in the directory of the build, as
``~/.cache/torch_extensions/py312_cpu/fused_adam/lock``. The building process keeps it open
(torch/utils/file_baton.py). https://docs.pytorch.org/docs/stable/cpp_extension.html says where
these directories are.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from pytest_distcompat import clock
from pytest_distcompat.launch.forensics.stacks import Frame


@dataclass(frozen=True)
class BuildLock:
    """The lock of a build.

    Attributes:
        path: The file.
        made_at: When it was made, in seconds since the epoch.
        holder: The process that builds; None if it is gone.
    """

    path: Path
    made_at: float
    holder: psutil.Process | None

    def __str__(self) -> str:
        if self.holder is None:
            return f"no process holds {self.path}, which a build that was killed left: remove it"
        pid = self.holder.pid
        name = self.holder.name()
        return f"{self.path} is held by process {pid} ({name})"


def is_waiting(frames: Iterable[Frame]) -> bool:
    """Tell whether a thread with these frames waits for another build, in a function of torch."""
    for frame in frames:
        in_lock = frame.file.endswith("/torch/utils/file_baton.py")
        if in_lock and frame.function == "wait":
            return True
    return False


def remove_abandoned(seconds: float, environment: Mapping[str, str]) -> None:
    """Remove the locks of killed builds that were made during a run which has just failed.

    Args:
        seconds: How long the run took. Only a lock made since then may be its own.
        environment: The ranks' environment variables, which say where the locks are.
    """
    began = clock.wall() - seconds
    for lock in _locks(environment):
        if lock.holder is None and lock.made_at >= began:
            lock.path.unlink(missing_ok=True)


def describe_locks(environment: Mapping[str, str]) -> str:
    """Return which process holds each lock, in a line; empty if there is no lock."""
    return "; ".join(map(str, _locks(environment)))


def _locks(environment: Mapping[str, str]) -> list[BuildLock]:
    """Return this user's locks, each with the process that holds it.

    Args:
        environment: The ranks' environment variables, which say where the locks are.
    """
    made_at: dict[Path, float] = {}
    for path in _lock_files(environment):
        # The lock may be gone by now.
        with contextlib.suppress(OSError):
            status = path.stat()
            if status.st_uid == os.getuid():
                made_at[path] = status.st_ctime
    if not made_at:
        return []
    holders = _processes_by_open_file()
    locks: list[BuildLock] = []
    for path, time in made_at.items():
        locks.append(BuildLock(path, time, holders.get(path)))
    return locks


def _lock_files(environment: Mapping[str, str]) -> list[Path]:
    """Return the locks in the directory of builds."""
    directory = environment.get("TORCH_EXTENSIONS_DIR")
    if directory:
        return sorted(Path(directory).resolve().glob("*/lock"))
    home = environment.get("HOME", "/")
    cache = environment.get("XDG_CACHE_HOME") or Path(home, ".cache")
    builds = Path(cache, "torch_extensions").resolve()
    # The default has a directory for each Python and CUDA.
    return sorted(builds.glob("*/*/lock"))


def _processes_by_open_file() -> dict[Path, psutil.Process]:
    """Return, by file, a process that has the file open.

    Only processes that this user may look into are read.
    """
    processes: dict[Path, psutil.Process] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            for file in process.open_files():
                processes[Path(file.path)] = process
    return processes
