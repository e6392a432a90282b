"""Say why a signal may have killed a rank: usual causes, out-of-memory kills, memory in use.

A rank that a signal killed reports nothing. ``conclude`` calls ``explain`` for it, and the lines go
into the report: ``explain(9, 1, 812843008)`` gives the usual causes of SIGKILL, ``the kernel killed
1 process for lack of memory since the rank started`` and ``resident memory of the rank at its last
report: 775 MiB``. The numbers were recorded before: each rank logs ``out_of_memory_kills`` when it
starts (``rank``), and its ``resident_memory`` with each event (``rank_log``).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

from pytest_distcompat.launch import pristine_builtins

#: By the number of a signal: its usual causes.
_CAUSES: dict[int, str] = {
    signal.SIGKILL: (
        "SIGKILL comes from the out-of-memory killer, a limit of a container or scheduler, "
        "or kill -9"
    ),
    signal.SIGSEGV: (
        "SIGSEGV comes from native code: an invalid address in an extension, or a stack overflow"
    ),
    signal.SIGABRT: (
        "SIGABRT comes from native code that gave up: a failed assertion, "
        "or a C++ exception that nothing caught"
    ),
    signal.SIGBUS: (
        "SIGBUS comes from mapped memory without storage: a full /dev/shm, "
        "or a file that was truncated"
    ),
    signal.SIGILL: "SIGILL comes from native code that was built for another CPU",
    signal.SIGXCPU: "SIGXCPU comes from a limit on CPU time (ulimit -t)",
}
_PAGE_SIZE = os.sysconf("SC_PAGE_SIZE")


def resident_memory() -> int:
    """Return the resident memory of this process in bytes; 0 where ``/proc`` is not to be read."""
    try:
        with pristine_builtins.open_file("/proc/self/statm", encoding="ascii") as file:
            # The second number is the size of the resident part, in pages.
            return int(file.read().split()[1]) * _PAGE_SIZE
    except (OSError, ValueError, IndexError):
        return 0


def out_of_memory_kills() -> int:
    """Return how many processes the kernel has killed for lack of memory since it booted.

    It counts those of all control groups:
    https://docs.kernel.org/admin-guide/cgroup-v2.html#memory-interface-files counts the same by
    group, but a rank may be in another group than its parent.
    """
    try:
        with pristine_builtins.open_file("/proc/vmstat", encoding="ascii") as file:
            counts = dict(line.split() for line in file)
        return int(counts.get("oom_kill", 0))
    except (OSError, ValueError):
        return 0


def explain(number: int, oom_kills: int | None, memory: int) -> Iterator[str]:
    """Yield lines on a rank's death; none for a signal without known causes, such as SIGTERM.

    Args:
        number: The number of the signal.
        oom_kills: How many processes the kernel killed for lack of memory since the rank started;
            None if unknown.
        memory: The resident memory of the rank at its last report, in bytes; 0 if unknown.
    """
    cause = _CAUSES.get(number)
    if cause is None:
        return
    yield cause
    if number == signal.SIGKILL and oom_kills is not None:
        plural = "" if oom_kills == 1 else "es"
        yield (
            f"the kernel killed {oom_kills or 'no'} process{plural} "
            "for lack of memory since the rank started"
        )
    if memory:
        yield f"resident memory of the rank at its last report: {memory >> 20} MiB"
