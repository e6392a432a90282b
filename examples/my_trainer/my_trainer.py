"""A small in-house trainer, as one might have: it knows DDP and FSDP2, upcasts before it shards, saves with DCP."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel


class Trainer:
    """Wraps a model, trains it one batch at a time, saves and loads."""

    def __init__(self, model: nn.Module, *, strategy: str, dtype: torch.dtype | None, device: torch.device) -> None:
        if strategy not in {"ddp", "fsdp2"}:
            raise ValueError(f"my_trainer does not support strategy {strategy!r}; use ddp or fsdp2")
        # Masters in float32 whatever the model was loaded in: the step that plain torch leaves to its user.
        model = model.to(device=device, dtype=torch.float32)
        self.device, self.dtype, self.strategy = device, dtype, strategy
        self.model: nn.Module = model
        if strategy == "ddp":
            self.model = DistributedDataParallel(model)
        else:
            policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
            for layer in model.children():
                fully_shard(layer, mp_policy=policy)
            fully_shard(model, mp_policy=policy)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def train_step(self, x: torch.Tensor, y: torch.Tensor) -> float:
        """One optimizer step; the loss of this rank."""
        autocast: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if self.strategy == "ddp" and self.dtype is not None:
            autocast = torch.autocast(self.device.type, dtype=self.dtype)
        self.optimizer.zero_grad()
        with autocast:
            loss = nn.functional.mse_loss(self.model(x).float(), y)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return float(loss.detach())

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def save(self, directory: Path) -> None:
        """A DCP checkpoint."""
        save(self._state(), checkpoint_id=directory)

    def load(self, directory: Path) -> None:
        """Go on from a DCP checkpoint."""
        state = self._state()
        load(state, checkpoint_id=directory)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def start(backend: str) -> None:
    """Join the process group that torchrun describes."""
    if not distributed.is_initialized():
        distributed.init_process_group(backend)
