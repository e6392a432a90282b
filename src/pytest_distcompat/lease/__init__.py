"""Leases of GPUs, or of CPU slots, to one process group at a time.

It knows neither ranks nor pytest. ``inventory`` lists the devices, ``places`` names those of a GPU
that runs share, ``tickets`` is the queue, ``pool`` leases devices, ``watch`` reports what a request
waits for, ``directory`` has the locks, ``timeline`` records leases, and ``packing`` orders
requests.
"""

from pytest_distcompat.lease.inventory import Inventory, cpu_slots, gpus, here
from pytest_distcompat.lease.packing import Demand, pack
from pytest_distcompat.lease.pool import Lease, LeaseTimeout, Pool, default_directory
from pytest_distcompat.lease.timeline import Leak, Span, entries, gaps, read_timeline
from pytest_distcompat.lease.watch import Holder

__all__ = [
    "Demand",
    "Holder",
    "Inventory",
    "Leak",
    "Lease",
    "LeaseTimeout",
    "Pool",
    "Span",
    "cpu_slots",
    "default_directory",
    "entries",
    "gaps",
    "gpus",
    "here",
    "pack",
    "read_timeline",
]
