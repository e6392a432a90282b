"""Whether a GPU's memory came back: seen free again before the next lease, or charged to the one that kept it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from pytest_distcompat import clock
from pytest_distcompat.devices import used_memory

#: How far above what it was before memory may stay, in bytes. The driver itself moves by a few MiB; the least that a
#: process costs, a CUDA context, is some hundreds.
TOLERANCE = 64 << 20
#: How long memory may take to come back, in seconds. That of a killed process takes a moment.
PATIENCE = 10.0
#: How often to look meanwhile, in seconds.
_POLL = 0.05


class Memory(Protocol):
    """What tells how much of each device's memory is in use."""

    def used(self, ids: Sequence[str]) -> Mapping[str, int]:
        """Bytes in use on each of these devices now, by whatever process; what cannot be told is left out."""


class DeviceMemory:
    """The memory of GPUs as NVML sees it. Of CPU slots it knows nothing, and there is nothing to know."""

    def used(self, ids: Sequence[str]) -> Mapping[str, int]:
        """Bytes in use."""
        return used_memory(ids)


@dataclass(frozen=True)
class Leak:
    """So many bytes above what was in use before stayed in use on that device after the lease of ``who``."""

    id: str
    bytes: int
    who: str


def await_free(
    memory: Memory, before: Mapping[str, int], *, tolerance: int = TOLERANCE, patience: float = PATIENCE
) -> dict[str, int]:
    """Wait up to ``patience`` seconds for each device to use no more than ``before`` again; bytes by which some still do."""
    deadline = clock.now() + patience
    while True:
        used = memory.used(list(before)) if before else {}
        above = {name: used[name] - before[name] for name in used if used[name] - before[name] > tolerance}
        if not above or clock.now() >= deadline:
            return above
        clock.sleep(_POLL)
