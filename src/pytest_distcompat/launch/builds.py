"""Locks of builds of torch's extensions: a build that is killed leaves its own, and all later ones wait for it for ever.

A lock is an empty file ``lock`` in the directory of the build, kept open by the process that builds (torch/utils/file_baton.py).
https://docs.pytorch.org/docs/stable/cpp_extension.html says where these directories are.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import psutil

from pytest_distcompat import clock
from pytest_distcompat.launch.stacks import Frame

#: Where torch waits for a lock.
_WAITS = ("/torch/utils/file_baton.py", "wait")


def waits(frames: Iterable[Frame]) -> bool:
    """Return whether a thread waits for another build."""
    return any(frame.file.endswith(_WAITS[0]) and frame.function == _WAITS[1] for frame in frames)


def remove_abandoned(seconds: float, environment: Mapping[str, str]) -> list[Path]:
    """Remove the locks that builds of the last ``seconds`` left which were killed; return these."""
    began = clock.wall() - seconds
    left = [lock for lock, holder in _held(environment) if holder is None and lock.stat().st_ctime >= began]
    for lock in left:
        lock.unlink(missing_ok=True)
    return left


def told(environment: Mapping[str, str]) -> str:
    """Return what is known of the locks for which a build may wait, in a line."""
    said = [
        f"{lock} is held by process {holder.pid} ({' '.join(holder.cmdline())[:80]})"
        if holder is not None
        else f"no process holds {lock}, which a build that was killed left: remove it"
        for lock, holder in _held(environment)
    ]
    return "; ".join(said)


def _held(environment: Mapping[str, str]) -> list[tuple[Path, psutil.Process | None]]:
    """All locks of this user, and who holds each."""
    locks = [lock for lock in _locks(environment) if lock.stat().st_uid == os.getuid()]
    if not locks:
        return []
    holders: dict[Path, psutil.Process] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            holders |= {Path(file.path): process for file in process.open_files()}
    return [(lock, holders.get(lock)) for lock in locks]


def _locks(environment: Mapping[str, str]) -> Iterator[Path]:
    named = environment.get("TORCH_EXTENSIONS_DIR")
    cache = environment.get("XDG_CACHE_HOME") or Path(environment.get("HOME", "/"), ".cache")
    # The default has a directory for each Python and CUDA.
    root, below = (Path(named), "*/lock") if named else (Path(cache, "torch_extensions"), "*/*/lock")
    with contextlib.suppress(OSError):
        yield from sorted(root.resolve().glob(below))
