"""Leases GPUs, or slots of the CPU, to one process group at a time. Knows neither ranks nor pytest.

``inventory`` is what there is, ``tickets`` who comes first, ``pool`` who has what, ``watch`` what a request waits for,
``directory`` the locks, ``memory`` whether it came back, ``timeline`` the record, ``packing`` in which order to ask.
"""

from pytest_distcompat.lease.inventory import Inventory, cpu_slots, gpus, here
from pytest_distcompat.lease.memory import Leak, Memory
from pytest_distcompat.lease.packing import Demand, Schedule, pack, simulate
from pytest_distcompat.lease.pool import Lease, LeaseTimeout, Pool, default_directory
from pytest_distcompat.lease.timeline import Instant, Span, busy, chart, entries, read_timeline
from pytest_distcompat.lease.watch import Holder

__all__ = [
    "Demand",
    "Holder",
    "Instant",
    "Inventory",
    "Leak",
    "Lease",
    "LeaseTimeout",
    "Memory",
    "Pool",
    "Schedule",
    "Span",
    "busy",
    "chart",
    "cpu_slots",
    "default_directory",
    "entries",
    "gpus",
    "here",
    "pack",
    "read_timeline",
    "simulate",
]
