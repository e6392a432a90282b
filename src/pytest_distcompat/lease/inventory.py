"""Inventory of the devices to lease: the GPUs that this process may use, or slots of the CPU.

A pytest session makes one ``Inventory`` from its options when it needs devices for the first time,
and hands it to its ``Pool``. The pool leases devices out of ``ids`` to each process group, so that
no two groups share one, unless the user lets them.

Names are ``GPU-8932f937-...`` (NVML's UUID) and ``cpu-3.1``, the second slot of core 3. A slot is
the right to run a rank on the CPU; no rank is pinned to its core.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pytest_distcompat.devices import gpu_numbers, visible_ids
from pytest_distcompat.failures import UsageProblem

#: Variables of visible devices: CUDA's, and HIP's on AMD's GPUs. ROCR_VISIBLE_DEVICES is not set:
#: HIP numbers the devices within it, so both would filter twice (torch/cuda/__init__.py).
VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
#: Has CUDA number the GPUs as NVML does; by default it puts the fastest first.
#: https://docs.nvidia.com/cuda/cuda-c-programming-guide/index.html#cuda-environment-variables
NVML_ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


@dataclass(frozen=True)
class Inventory:
    """Devices of one kind.

    Attributes:
        kind: ``gpu`` or ``cpu``.
        ids: The names of the devices. They are the same for every process of the machine, so that
            several pytest sessions agree on them.
        ranks_each: How many ranks may share a GPU if there are fewer GPUs than ranks.
        runs_share: Whether ranks of several runs may share a GPU. If not, a run takes whole GPUs. A
            run is one process group from start to end.
    """

    kind: Literal["gpu", "cpu"]
    ids: tuple[str, ...]
    ranks_each: int = 1
    runs_share: bool = False

    def __post_init__(self) -> None:
        """Raise UsageProblem for an inventory that is empty or names a device twice."""
        if not self.ids or len(set(self.ids)) < len(self.ids):
            raise UsageProblem(
                f"an inventory needs at least one device and each once, not {list(self.ids)}"
            )

    @property
    def words(self) -> str:
        """Return the name of its devices in messages."""
        return {"gpu": "GPUs", "cpu": "CPU slots"}[self.kind]

    @property
    def places(self) -> int:
        """Into how many places a device is divided: so many runs of one rank may use it at once."""
        return self.ranks_each if self.runs_share else 1

    def needed(self, ranks: int) -> int:
        """Return how many devices to lease for so many ranks.

        Ranks can share cores, so more ranks than CPU slots take all slots. Up to ``ranks_each``
        ranks can share a GPU: 4 ranks take 4 of 8 GPUs, and both of 2 GPUs if ``ranks_each`` is 2.

        Raises:
            UsageProblem: If there are too few GPUs, or ``ranks`` is below 1.
        """
        if ranks < 1:
            raise UsageProblem(f"a lease is of at least 1, not {ranks}")
        # Rounded up.
        least = -(-ranks // self.ranks_each)
        if self.kind == "gpu" and least > len(self.ids):
            known = ", ".join(self.ids)
            raise UsageProblem(
                f"{ranks} ranks need {least} GPUs; there are {len(self.ids)}: {known}"
            )
        return min(ranks, len(self.ids))

    def environment(self, ids: Sequence[str]) -> dict[str, str]:
        """Return the variables that make only these devices visible.

        There are none for CPU slots, to which nothing is pinned. GPUs are named by number, because
        some libraries take ``int`` of each entry (deepspeed/accelerator/cuda_accelerator.py):
        ``CUDA_VISIBLE_DEVICES=0,3``.
        """
        if self.kind != "gpu":
            return {}
        numbers = gpu_numbers(ids)
        if numbers is None:
            # A MIG instance, a part of a GPU, has a UUID and no number.
            return dict.fromkeys(VISIBLE, ",".join(ids))
        listed = ",".join(map(str, numbers))
        return {**dict.fromkeys(VISIBLE, listed), **NVML_ORDER}


def gpus(
    most: int | None = None,
    ranks_each: int = 1,
    wanted: Sequence[str] = (),
    *,
    runs_share: bool = False,
) -> Inventory:
    """Return the first ``most`` GPUs that are visible to this process, or all of them.

    Args:
        most: The number of GPUs; None for all.
        ranks_each: See ``Inventory``.
        wanted: Entries of CUDA_VISIBLE_DEVICES to use in place of those in the environment.
        runs_share: See ``Inventory``.

    Raises:
        UsageProblem: If there are none.
    """
    visible = visible_ids(",".join(wanted) or None)
    ids = tuple(visible[:most])
    return Inventory("gpu", ids, ranks_each, runs_share)


#: Slots for each core. Ranks spend much of their time waiting for each other, so two groups keep
#: the cores busy: in the built-in suite a quarter of two cores is idle with one group at a time,
#: and almost nothing with two.
SLOTS = 2


def cpu_slots() -> Inventory:
    """Return the slots of the cores that this process may run on.

    Sessions that are pinned to different cores share none.
    """
    ids = []
    for core in sorted(os.sched_getaffinity(0)):
        ids += [f"cpu-{core}.{slot}" for slot in range(SLOTS)]
    return Inventory("cpu", tuple(ids))


def here() -> Inventory:
    """Return the GPUs of this machine, or CPU slots if there are none."""
    return gpus() if visible_ids() else cpu_slots()
