"""Locks of builds of torch's extensions: a killed build leaves its lock, and all later builds wait for it for ever.

A lock is an empty file ``lock`` in the directory of the build, which the building process keeps open
(torch/utils/file_baton.py). https://docs.pytorch.org/docs/stable/cpp_extension.html says where these directories are.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import psutil

from pytest_distcompat import clock
from pytest_distcompat.launch.stacks import Frame


def is_waiting(frames: Iterable[Frame]) -> bool:
    """Tell whether a thread with these frames waits for another build, in a function of torch."""
    return any(frame.file.endswith("/torch/utils/file_baton.py") and frame.function == "wait" for frame in frames)


def remove_abandoned(seconds: float, environment: Mapping[str, str]) -> None:
    """Remove the locks of killed builds that were made within the last ``seconds``."""
    began = clock.wall() - seconds
    for lock, made, holder in _locks(environment):
        if holder is None and made >= began:
            lock.unlink(missing_ok=True)


def describe_locks(environment: Mapping[str, str]) -> str:
    """Return what is known of the locks for which a build may wait, in a line."""
    return "; ".join(
        f"no process holds {lock}, which a build that was killed left: remove it"
        if holder is None
        else f"{lock} is held by process {holder.pid} ({holder.name()})"
        for lock, _, holder in _locks(environment)
    )


def _locks(environment: Mapping[str, str]) -> list[tuple[Path, float, psutil.Process | None]]:
    """Return this user's locks: the file, when it was made, and the process that holds it."""
    named = environment.get("TORCH_EXTENSIONS_DIR")
    cache = environment.get("XDG_CACHE_HOME") or Path(environment.get("HOME", "/"), ".cache")
    # The default has a directory for each Python and CUDA.
    root, below = (Path(named), "*/lock") if named else (Path(cache, "torch_extensions"), "*/*/lock")
    found: dict[Path, float] = {}
    for lock in sorted(root.resolve().glob(below)):
        # The lock may be gone by now.
        with contextlib.suppress(OSError):
            made = lock.stat()
            if made.st_uid == os.getuid():
                found[lock] = made.st_ctime
    holders: dict[Path, psutil.Process] = {}
    for process in psutil.process_iter() if found else ():
        with contextlib.suppress(psutil.Error, OSError):
            holders |= {Path(file.path): process for file in process.open_files()}
    return [(lock, made, holders.get(lock)) for lock, made in found.items()]
