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

#: How the paths of shared mappings begin that are memory, and no file on a disk. They are those of
#: ``/proc/self/maps``: anonymous memory, POSIX shared memory, memfd_create(2), System V.
_MEMORY_PATHS = ("/dev/zero", "/dev/shm/", "/memfd:", "/SYSV")  # noqa: S108 - only compared


def open_files() -> frozenset[tuple[int, str]]:
    """Return this process's file descriptors, with the files that they lead to.

    For example ``(7, "/repo/cache.db")``. Terminals and other character devices are left out.
    """
    files = set()
    for link in Path("/proc/self/fd").glob("*"):
        descriptor = int(link.name)
        # A descriptor may be closed by now, as that with which the directory was listed.
        with contextlib.suppress(OSError):
            mode = os.fstat(descriptor).st_mode
            if not stat.S_ISCHR(mode):
                files.add((descriptor, str(link.readlink())))
    return frozenset(files)


def shared_memory() -> frozenset[str]:
    """Return the writable mappings that forks share and that are no file on a disk.

    For example ``/dev/zero (deleted) at 7f0c5a000000-7f0c5a001000``, which ``mmap.mmap(-1, 4096)``
    makes. Mappings of deleted files are among them.

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
        if path.startswith(_MEMORY_PATHS) or path.endswith(" (deleted)"):
            mappings.add(f"{path} at {address}")
    return frozenset(mappings)
