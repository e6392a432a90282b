"""World: a rank's place in the process group and its device, from torchrun's environment."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class World:
    """Place of one rank in its group and on this machine; ``shared``: there are fewer GPUs than ranks."""

    rank: int
    size: int
    local_rank: int
    device: str
    shared: bool = False

    @classmethod
    def from_environment(cls, device: str) -> World:
        """Read RANK, WORLD_SIZE and LOCAL_RANK, which trainers take for their GPU: set it where ranks share some."""
        rank, size, local_rank = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        if device != "cuda":
            return cls(rank, size, local_rank, device)
        visible = len(os.environ.get("CUDA_VISIBLE_DEVICES", "").split(","))
        shared = "CUDA_VISIBLE_DEVICES" in os.environ and visible < int(os.environ.get("LOCAL_WORLD_SIZE", size))
        if shared:
            local_rank %= visible
            os.environ["LOCAL_RANK"] = str(local_rank)
        return cls(rank, size, local_rank, f"cuda:{local_rank}", shared)

    def first(self, *, per_node: bool) -> bool:
        """Tell whether this is rank 0, or with ``per_node`` the first rank of its node."""
        return not (self.local_rank if per_node else self.rank)

    @property
    def backend(self) -> str:
        """Return the torch.distributed backend for the device: NCCL refuses two ranks on one GPU."""
        return "nccl" if self.device.startswith("cuda") and not self.shared else "gloo"
