"""Leases of GPUs, or of CPU slots, to one process group at a time.

Several xdist workers, and several pytest sessions of one user on one machine, start process groups
at the same time. Before each one ``leased.LeasedLauncher`` asks a ``Pool`` for as many devices as
the group has ranks, and gives them back when the ranks have ended. All pools of a user agree
through files in one directory. A CPU slot stands for a part of a core where there are no GPUs.

This package knows neither what ranks do nor pytest. ``inventory`` lists the devices, ``tickets`` is
the queue of requests, ``pool`` leases devices, ``watch`` reports what a request waits for,
``directory`` has the locks, ``timeline`` records leases, and ``packing`` orders tests so that the
devices are busy. ``pytest_distcompat.places`` names the places of a GPU that runs share.
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
