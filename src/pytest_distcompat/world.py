"""World: a rank's place in the process group and its device, from torchrun's environment.

On each rank ``worker`` (for a suite) and ``plugin.on_ranks`` (for a marked test) make a ``World``
before anything else runs: the driver or the test gets it as ``world``. Rank 1 of 2 on two GPUs is
``World(rank=1, size=2, local_rank=1, device="cuda:1")``.

Usually each rank has a GPU of its own. With fewer GPUs than ranks several ranks share one: then
each may use a part of its memory, and the backend is gloo where NCCL refuses such ranks. Ranks of
other runs may share a GPU too, if the user allows it (``--distcompat-ranks-per-gpu``).
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from typing import Any

#: The variable with which NCCL takes several ranks on one GPU (``launch.nccl``).
SHARES_GPUS = "NCCL_MULTI_RANK_GPU_ENABLE"
#: The variable with the number of ranks, of all runs, that may use a GPU at the same time. Only
#: ranks of a session whose runs share GPUs have it.
RANKS_PER_GPU = "DISTCOMPAT_RANKS_PER_GPU"


@dataclass(frozen=True)
class World:
    """Place of one rank in its group and on this machine.

    Attributes:
        rank: The number of the rank, from 0: torchrun's ``RANK``.
        size: The number of ranks: ``WORLD_SIZE``.
        local_rank: The number of the rank on its machine or, if ranks share GPUs, of its GPU.
        device: ``cpu``, or the rank's GPU: ``cuda:1``.
        shared: Whether there are fewer GPUs than ranks.
        nccl: Whether NCCL takes the ranks that share a GPU.
        ranks_each: The largest number of ranks on one GPU, those of other runs included.
        own_disks: Whether ranks of other machines do not see the files that this one writes.
    """

    rank: int
    size: int
    local_rank: int
    device: str
    shared: bool = False
    nccl: bool = False
    ranks_each: int = 1
    own_disks: bool = False

    @classmethod
    def from_environment(cls, device: str) -> World:
        """Read the place of this rank from RANK, WORLD_SIZE and LOCAL_RANK.

        Trainers take LOCAL_RANK for their GPU: it is set where ranks share some.
        """
        rank = int(os.environ["RANK"])
        size = int(os.environ["WORLD_SIZE"])
        local_rank = int(os.environ["LOCAL_RANK"])
        if device != "cuda":
            return cls(rank, size, local_rank, device)
        visible = len(os.environ.get("CUDA_VISIBLE_DEVICES", "").split(","))
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
        # A rank of a small run has the same part of the memory as that of a large one: its verdict
        # depends on no neighbour.
        of_all_runs = int(os.environ.get(RANKS_PER_GPU, "1"))
        if "CUDA_VISIBLE_DEVICES" not in os.environ or visible >= local_size:
            # Each rank of this run has a GPU of its own.
            return cls(rank, size, local_rank, f"cuda:{local_rank}", ranks_each=of_all_runs)
        # Ranks go round: with 2 GPUs ranks 0 and 2 share the first.
        local_rank %= visible
        os.environ["LOCAL_RANK"] = str(local_rank)
        nccl = os.environ.get(SHARES_GPUS) == "1"
        of_this_run = -(-local_size // visible)
        ranks_each = max(of_all_runs, of_this_run)
        return cls(rank, size, local_rank, f"cuda:{local_rank}", True, nccl, ranks_each)

    @property
    def divides_memory(self) -> bool:
        """Whether other ranks may use this rank's GPU."""
        return self.ranks_each > 1

    def divide_memory(self) -> None:
        """Let this rank use no more than its part of a GPU's memory.

        Otherwise it could take that of another rank.
        """
        if self.divides_memory:
            import torch

            torch.cuda.set_per_process_memory_fraction(1 / self.ranks_each, self.local_rank)

    def divide_memory_once_used(self, torch: Any) -> None:
        """Divide the memory as soon as this process opens CUDA, for a marked test.

        Some tests never open it, and some fork before they do. ``torch`` is the module.
        """
        if self.divides_memory:
            _divide_once_used(self, torch)

    @property
    def writes_first(self) -> bool:
        """Tell whether this is the first of the ranks that see the same files.

        It is rank 0, or the first rank of its machine.
        """
        number = self.local_rank if self.own_disks else self.rank
        return number == 0

    @property
    def backend(self) -> str:
        """Return the torch.distributed backend for the device: ``nccl`` or ``gloo``.

        NCCL takes ranks that share a GPU from 2.30 on.
        """
        if not self.device.startswith("cuda"):
            return "gloo"
        return "nccl" if self.nccl or not self.shared else "gloo"


@functools.cache
def _divide_once_used(world: World, torch: Any) -> None:
    # Kept ranks ask for it again with each test. torch seeds its generators of CUDA in the same way
    # (torch/cuda/random.py).
    torch.cuda._lazy_call(world.divide_memory)  # noqa: SLF001 - watched by tests/launch/test_private_names.py
