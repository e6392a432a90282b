"""Where a rank stands: its place in the process group and its device, as torchrun's environment says it."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class World:
    """One rank's view: ``rank`` of ``size``, ``local_rank`` on this machine, ``device`` as a string for torch.device.

    ``shared`` says that there are fewer GPUs than ranks.
    """

    rank: int
    size: int
    local_rank: int
    device: str
    shared: bool = False

    @classmethod
    def from_environment(cls, device: str) -> World:
        """Read RANK, WORLD_SIZE and LOCAL_RANK; ``device`` is "cpu" or "cuda".

        Where ranks share GPUs LOCAL_RANK is changed: to trainers it is the number of the GPU that is a rank's own.
        """
        rank, size, local_rank = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        if device != "cuda":
            return cls(rank, size, local_rank, device)
        visible = len(os.environ.get("CUDA_VISIBLE_DEVICES", "").split(","))
        shared = "CUDA_VISIBLE_DEVICES" in os.environ and visible < size
        if shared:
            local_rank %= visible
            os.environ["LOCAL_RANK"] = str(local_rank)
        return cls(rank, size, local_rank, f"cuda:{local_rank}", shared)

    @property
    def backend(self) -> str:
        """The torch.distributed backend for the device: NCCL refuses two ranks on one GPU."""
        return "nccl" if self.device.startswith("cuda") and not self.shared else "gloo"
