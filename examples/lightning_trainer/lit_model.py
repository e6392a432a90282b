"""A LightningModule as its users write one: it makes the optimizer, shards itself for FSDP2, and clips."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from pytorch_lightning import LightningModule
from torch import nn
from torch.distributed.fsdp import fully_shard


class Rows:
    """Batches, and how many of them were given out: Lightning saves that with a checkpoint in mid-epoch, where a loader tells it.

    https://lightning.ai/docs/pytorch/stable/common/checkpointing_intermediate.html
    """

    def __init__(self, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self.batches, self.given = batches, 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while self.given < len(self.batches):
            self.given += 1
            yield self.batches[self.given - 1]
        self.given = 0

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given = state["given"]


class LitModel(LightningModule):
    """Learns by mean squared errors."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        self.norm = 0.0

    def forward(self, x: torch.Tensor) -> Any:
        return self.layers(x)

    def configure_model(self) -> None:
        """Called on every rank before the optimizer is made; there is a mesh under ModelParallelStrategy."""
        if self.device_mesh is not None:
            for layer in self.layers:
                if isinstance(layer, nn.Linear):
                    fully_shard(layer, mesh=self.device_mesh["data_parallel"])
            fully_shard(self, mesh=self.device_mesh["data_parallel"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], _number: int) -> torch.Tensor:
        x, wanted = batch
        return nn.functional.mse_loss(self(x).float(), wanted)

    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
        """Lightning's own clips no sharded gradients; torch's does."""
        norm: Any = nn.utils.clip_grad_norm_(self.parameters(), 1.0)
        self.norm = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
