"""Locks of builds of torch's extensions: a build that is killed leaves its own, and all later ones wait for it for ever.

A lock is an empty file ``lock`` in the directory of the build, kept open by the process that builds (torch/utils/file_baton.py).
https://docs.pytorch.org/docs/stable/cpp_extension.html says where these directories are.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import psutil

from pytest_distcompat import clock
from pytest_distcompat.launch.stacks import Frame

#: Where torch waits for a lock.
_WAITS = ("/torch/utils/file_baton.py", "wait")


def waits(frames: Iterable[Frame]) -> bool:
    """Return whether a thread waits for another build."""
    return any(frame.file.endswith(_WAITS[0]) and frame.function == _WAITS[1] for frame in frames)


def remove_abandoned(seconds: float, environment: Mapping[str, str]) -> None:
    """Remove the locks that builds of the last ``seconds`` left which were killed."""
    began = clock.wall() - seconds
    for lock, made, holder in _locks(environment):
        if holder is None and made >= began:
            lock.unlink(missing_ok=True)


def told(environment: Mapping[str, str]) -> str:
    """Return what is known of the locks for which a build may wait, in a line."""
    said = [
        f"no process holds {lock}, which a build that was killed left: remove it"
        if holder is None
        else f"{lock} is held by process {holder.pid} ({holder.name()})"
        for lock, _, holder in _locks(environment)
    ]
    return "; ".join(said)


def _locks(environment: Mapping[str, str]) -> list[tuple[Path, float, psutil.Process | None]]:
    """All locks of this user, when each was made, and who holds it."""
    named = environment.get("TORCH_EXTENSIONS_DIR")
    cache = environment.get("XDG_CACHE_HOME") or Path(environment.get("HOME", "/"), ".cache")
    # The default has a directory for each Python and CUDA.
    root, below = (Path(named), "*/lock") if named else (Path(cache, "torch_extensions"), "*/*/lock")
    found: dict[Path, float] = {}
    for lock in sorted(root.resolve().glob(below)):
        # It may be gone by now.
        with contextlib.suppress(OSError):
            made = lock.stat()
            if made.st_uid == os.getuid():
                found[lock] = made.st_ctime
    holders: dict[Path, psutil.Process] = {}
    for process in psutil.process_iter() if found else ():
        with contextlib.suppress(psutil.Error, OSError):
            holders |= {Path(file.path): process for file in process.open_files()}
    return [(lock, made, holders.get(lock)) for lock, made in found.items()]
