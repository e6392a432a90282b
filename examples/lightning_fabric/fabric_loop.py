"""A training loop on Lightning's Fabric, as https://lightning.ai/docs/fabric/stable/ writes it: DDP and FSDP2, with clipping."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning_fabric import Fabric
from lightning_fabric.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard


def shard(model: nn.Module, mesh: Any) -> nn.Module:
    """Each linear layer, then the rest."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            fully_shard(module, mesh=mesh["data_parallel"])
    fully_shard(model, mesh=mesh["data_parallel"])
    return model


class FabricLoop:
    """Trains a model on mean squared errors."""

    def __init__(self, model: nn.Module, *, strategy: str, precision: Any, device: str, ranks: int) -> None:
        backend = "nccl" if device == "cuda" else "gloo"
        strategies: dict[str, Any] = {
            "ddp": lambda: DDPStrategy(process_group_backend=backend),
            "fsdp2": lambda: ModelParallelStrategy(
                shard, data_parallel_size=ranks, tensor_parallel_size=1, process_group_backend=backend
            ),
        }
        if strategy not in strategies:
            raise ValueError(f"FabricLoop does not support strategy {strategy!r}, only {', '.join(strategies)}")
        self.fabric = Fabric(accelerator=device, devices=ranks, strategy=strategies[strategy](), precision=precision)
        self.fabric.launch()
        # Sharded first: the optimizer is to hold the shards.
        self.model = self.fabric.setup_module(model)
        self.optimizer = self.fabric.setup_optimizers(torch.optim.AdamW(self.model.parameters(), lr=3e-3))
        self.norm = 0.0

    def train_step(self, x: torch.Tensor, wanted: torch.Tensor) -> float:
        """One optimizer step; the loss on this rank."""
        loss = nn.functional.mse_loss(self.model(x).float(), wanted)
        self.optimizer.zero_grad()
        self.fabric.backward(loss)
        norm: Any = self.fabric.clip_gradients(self.model, self.optimizer, max_norm=1.0)
        self.norm = float(norm)
        self.optimizer.step()
        return loss.item()

    def save(self, path: Path) -> None:
        """A file under DDP, a directory of shards under FSDP2."""
        self.fabric.save(path, {"model": self.model, "optimizer": self.optimizer})

    def load(self, path: Path) -> None:
        """Into this loop's own objects."""
        self.fabric.load(path, {"model": self.model, "optimizer": self.optimizer})
