"""A training loop on DeepSpeed's own engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import nn


class Loop:
    """One engine, trained a batch at a time."""

    def __init__(self, model: nn.Module, stage: int, *, bf16: bool, backend: str) -> None:
        deepspeed.init_distributed(dist_backend=backend)
        config = {
            "train_micro_batch_size_per_gpu": 8,
            "gradient_clipping": 1.0,
            # By default stage 3 leaves small parameters whole.
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            "bf16": {"enabled": bf16},
            "zero_allow_untested_optimizer": True,
        }
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.engine: Any
        self.engine, self.optimizer, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def step(self, x: torch.Tensor, y: torch.Tensor) -> float:
        """One optimizer step; the loss of this rank."""
        loss = nn.functional.mse_loss(self.engine(x).float(), y)
        self.engine.backward(loss)
        self.engine.step()
        return float(loss.detach())

    def save(self, directory: Path) -> None:
        """DeepSpeed's checkpoint."""
        self.engine.save_checkpoint(str(directory))

    def load(self, directory: Path) -> None:
        """Go on from it."""
        self.engine.load_checkpoint(str(directory))
