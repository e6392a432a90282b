"""A small trainer on accelerate, as a team might have: prepare, a loop, save_state and load_state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn


class Layer(nn.Module):
    """A residual layer: FSDP wraps it by its class name."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (batch, width) in and out."""
        return x + torch.relu(self.linear(self.norm(x)))


class Model(nn.Module):
    """(batch, 6) -> (batch, 3)."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(6, 8)
        self.layers = nn.ModuleList([Layer(8), Layer(8)])
        self.outlet = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits."""
        x = self.inlet(x)
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.outlet(x)
        return logits


class FineTuner:
    """Takes the Accelerator that its user configured."""

    def __init__(self, model: nn.Module, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.model, self.optimizer = accelerator.prepare(model, optimizer)
        self.norm: float | None = None

    def step(self, x: torch.Tensor, labels: torch.Tensor) -> float:
        """One optimizer step; the loss of this rank."""
        loss = nn.functional.cross_entropy(self.model(x).float(), labels)
        self.accelerator.backward(loss)
        norm: Any = self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
        self.norm = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def save(self, directory: Path) -> None:
        """All that is needed to go on."""
        self.accelerator.save_state(str(directory))

    def load(self, directory: Path) -> None:
        """Go on."""
        self.accelerator.load_state(str(directory))
