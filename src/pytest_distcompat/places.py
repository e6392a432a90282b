"""Places of a GPU that runs share: their names, and which of them can be leased at the same time.

With ``--distcompat-ranks-per-gpu 4`` the ranks of up to four runs may be on one GPU at the same
time. The GPU then has four places, and each rank leases one (``lease.pool``). ``GPU-a`` is a whole
GPU, ``GPU-a.place-2-of-4`` the second of its four places. Locks, records, messages and the timeline
of leases use these names.
"""

from __future__ import annotations

_PLACE = ".place-"
_OF = "-of-"


def place_names(device: str, count: int) -> list[str]:
    """Return the names of the ``count`` places of a GPU: ``GPU-a.place-1-of-2``, ..."""
    names: list[str] = []
    for number in range(1, count + 1):
        names.append(f"{device}{_PLACE}{number}{_OF}{count}")
    return names


def device_of(name: str) -> str:
    """Return the device of a place; a name of a whole device as it is."""
    return name.partition(_PLACE)[0]


def place_of(name: str) -> str:
    """Return what follows the device in a place's name, ``.place-2-of-4``; empty for a device."""
    return name.removeprefix(device_of(name))


def places_in(name: str) -> int:
    """Return into how many places the device of this place is divided; 1 for a whole device."""
    count = place_of(name).rpartition(_OF)[2]
    return int(count) if count else 1


def may_be_held_beside(name: str, other: str) -> bool:
    """Tell whether two processes may hold these two names of one device at the same time.

    Places of a division into two and of one into four exclude each other: together they could be
    more than the GPU.
    """
    return name != other and places_in(name) == places_in(other) > 1
