"""What there is to lease: the GPUs this process may use or, without any, slots of the CPU."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pytest_distcompat.devices import visible_ids
from pytest_distcompat.failures import UsageProblem

#: The variables that tell runtimes which devices to show, where they take names (UUIDs) and numbers: CUDA's, and HIP's on AMD's
#: GPUs. Not ROCR_VISIBLE_DEVICES: HIP's numbers count within it, both would leave out twice (torch/cuda/__init__.py).
BY_NAME = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
#: Those of runtimes that take numbers only, as accelerate's launcher knows them (accelerate/utils/launch.py): Ascend, Cambricon,
#: Moore Threads, Tecorigin, Gaudi, Neuron, Intel.
BY_NUMBER = (
    "ASCEND_RT_VISIBLE_DEVICES",
    "MLU_VISIBLE_DEVICES",
    "MUSA_VISIBLE_DEVICES",
    "SDAA_VISIBLE_DEVICES",
    "HABANA_VISIBLE_MODULES",
    "NEURON_RT_VISIBLE_CORES",
    "ZE_AFFINITY_MASK",
)


@dataclass(frozen=True)
class Inventory:
    """Devices of one kind. Their ids mean the same to every process of the machine, so that several pytest runs agree.

    ``ranks_each`` is how many ranks may share a GPU where there are fewer GPUs than ranks.
    """

    kind: Literal["gpu", "cpu"]
    ids: tuple[str, ...]
    ranks_each: int = 1

    def __post_init__(self) -> None:
        """Raises UsageProblem for an inventory that is empty or names something twice."""
        if not self.ids or len(set(self.ids)) < len(self.ids):
            raise UsageProblem(f"an inventory needs at least one device and each once, not {list(self.ids)}")

    @property
    def words(self) -> str:
        """What its devices are called."""
        return {"gpu": "GPUs", "cpu": "CPU slots"}[self.kind]

    def needed(self, ranks: int) -> int:
        """How many devices so many ranks take. Raises UsageProblem for more ranks than the GPUs may have.

        Cores can be shared: ranks beyond their number take all slots, and so wait for nothing that will never be. So it
        is with GPUs, up to ``ranks_each``.
        """
        if ranks < 1:
            raise UsageProblem(f"a lease is of at least 1, not {ranks}")
        least = -(-ranks // self.ranks_each)
        if self.kind == "gpu" and least > len(self.ids):
            raise UsageProblem(f"{ranks} ranks need {least} GPUs; there are {len(self.ids)}: {', '.join(self.ids)}")
        return min(ranks, len(self.ids))

    def environment(self, ids: Sequence[str]) -> dict[str, str]:
        """What shows a process these devices and no others. Slots of the CPU are a count, no place: nothing is pinned."""
        if self.kind == "cpu":
            return {}
        numbers = all(name.isdecimal() for name in ids)
        return dict.fromkeys((*BY_NAME, *(BY_NUMBER if numbers else ())), ",".join(ids))


def gpus(most: int | None = None, ranks_each: int = 1) -> Inventory:
    """The first ``most`` of the GPUs that CUDA shows this process, or all. Raises UsageProblem where there are none."""
    return Inventory("gpu", tuple(visible_ids()[:most]), ranks_each)


#: Slots a core. Ranks wait for one another a good part of their time, so two groups of a rank a core keep the cores busy: of the
#: built-in suite a quarter of two cores idles with one group at a time, next to nothing with two.
SLOTS = 2


def cpu_slots() -> Inventory:
    """Slots for the cores that this process may run on; runs that are pinned to different cores share none."""
    cores = sorted(os.sched_getaffinity(0))
    return Inventory("cpu", tuple(f"cpu-{core}.{slot}" for core in cores for slot in range(SLOTS)))


def here() -> Inventory:
    """The GPUs, or CPU slots where there are none."""
    return gpus() if visible_ids() else cpu_slots()
