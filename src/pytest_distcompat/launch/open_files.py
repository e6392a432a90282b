"""What this process has open: files, and memory that it shares with its forks.

``at_import.Watch`` compares both, in a process from which ranks are forked: the open files before
and after each module of the user's, the shared memory before and after the whole collection. An
open file would have one offset for all ranks, and what a rank writes to shared memory the other
ranks would read.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

#: How the paths of shared memory begin that no file keeps, in ``/proc/self/maps``.
_UNKEPT_MEMORY = ("/dev/zero", "/dev/shm/", "/memfd:", "/SYSV")  # noqa: S108 - as there


def open_files() -> frozenset[tuple[int, str]]:
    """Return this process's file descriptors, with the files that they lead to.

    For example ``(7, "/repo/cache.db")``. Terminals and other character devices are left out.
    """
    files = set()
    for link in Path("/proc/self/fd").glob("*"):
        with contextlib.suppress(OSError):
            if not stat.S_ISCHR(os.fstat(int(link.name)).st_mode):
                files.add((int(link.name), str(link.readlink())))
    return frozenset(files)


def shared_memory() -> frozenset[str]:
    """Return the mappings of memory that forks share, while no file keeps what is written there.

    For example ``/dev/zero (deleted) at 7f0c5a000000-7f0c5a001000``, which ``mmap.mmap(-1, 4096)``
    makes.

    proc_pid_maps(5): each line has an address, permissions (``s`` is shared), an offset, a device,
    an inode and a path.
    """
    mappings = set()
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        if " rw-s " not in line:
            continue
        fields = line.split(maxsplit=5)
        address = fields[0]
        path = fields[5] if len(fields) > 5 else ""
        if path.startswith(_UNKEPT_MEMORY) or path.endswith(" (deleted)"):
            mappings.add(f"{path} at {address}")
    return frozenset(mappings)
