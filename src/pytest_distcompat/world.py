"""Where a rank stands: its place in the process group and its device, as torchrun's environment says it."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class World:
    """One rank's view: ``rank`` of ``size``, ``local_rank`` on this machine, ``device`` as a string for torch.device."""

    rank: int
    size: int
    local_rank: int
    device: str

    @classmethod
    def from_environment(cls, device: str) -> World:
        """Read RANK, WORLD_SIZE and LOCAL_RANK; ``device`` is "cpu" or "cuda"."""
        local_rank = int(os.environ["LOCAL_RANK"])
        name = f"cuda:{local_rank}" if device == "cuda" else device
        return cls(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), local_rank, name)

    @property
    def backend(self) -> str:
        """The torch.distributed backend for the device."""
        return "nccl" if self.device.startswith("cuda") else "gloo"
