"""Check that a lease has freed the memory of its GPUs before the next one begins."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pytest_distcompat import clock

#: How many bytes more than before a lease may stay in use after it. The driver's own use varies by a few MiB; the least that
#: a process uses, a CUDA context, is some hundreds.
TOLERANCE = 64 << 20
#: How long memory may take to become free, in seconds. That of a killed process takes a moment.
FREE_TIMEOUT_S = 10.0
#: The interval between measurements, in seconds.
_POLL = 0.05


#: Returns the bytes in use on each device, by all processes; devices whose use is unknown are left out.
Memory = Callable[[Sequence[str]], Mapping[str, int]]


@dataclass(frozen=True)
class Leak:
    """Memory that was not in use before the lease of ``who``, and still was after it: ``bytes`` on the device ``id``."""

    id: str
    bytes: int
    who: str


def await_free(
    memory: Memory, before: Mapping[str, int], *, tolerance: int = TOLERANCE, timeout: float = FREE_TIMEOUT_S
) -> dict[str, int]:
    """Wait until each device uses no more memory than ``before`` a lease, but for ``tolerance`` bytes.

    Returns:
        Device -> bytes above ``before``, for the devices that still exceed the tolerance after ``timeout`` seconds.
    """
    deadline = clock.now() + timeout
    while True:
        used = memory(list(before)) if before else {}
        above = {name: used[name] - before[name] for name in used if used[name] - before[name] > tolerance}
        if not above or clock.now() >= deadline:
            return above
        clock.sleep(_POLL)
