"""Plain torch: DDP, FSDP1 and FSDP2 by their own API, checkpoints by torch.distributed.checkpoint.

https://pytorch.org/docs/stable/distributed.checkpoint.html
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pytest_distcompat.drivers._tiny import TinyDriver
from pytest_distcompat.strategies import STRATEGIES

if TYPE_CHECKING:
    from torch.nn import Module

    from pytest_distcompat.cell import Cell


class TorchDriver(TinyDriver):
    """The training loop of torch's own tutorials."""

    name: ClassVar[str] = "torch"
    preload: ClassVar[tuple[str, ...]] = (
        "torch.distributed.fsdp",
        "torch.distributed.checkpoint",
        "torch.distributed.checkpoint.state_dict",
        "torch.distributed.tensor",
        "torch.nn.parallel",
    )
    options: ClassVar[tuple[str, ...]] = ("model", "state_dict")
    order: ClassVar[int] = 0

    @classmethod
    def unable(cls, cell: Cell, device: str = "cpu") -> str:
        """The strategies that torch itself does not have."""
        if STRATEGIES.get(cell.strategy).torch is None:
            return f"plain torch has no {cell.strategy}; it is a strategy of DeepSpeed"
        return super().unable(cell, device)

    def build(self, model: Module) -> None:
        """Process group, wrapper, optimizer, in the order that torch's documentation gives."""
        import torch
        from torch import distributed

        device = torch.device(self.world.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if not distributed.is_initialized():
            distributed.init_process_group(self.world.backend)
        assert self.strategy.torch is not None
        self.model = self.strategy.torch(model, self.precision, self.cell, device)
        self.optimizer = self.make_optimizer(self.model)
        self.scheduler = self.make_scheduler(self.optimizer)

    def step(self, number: int) -> float:
        """Forward, backward, optimizer and scheduler step."""
        self.optimizer.zero_grad()
        with self._autocast():
            loss = self.tiny.loss(self.model, self.batch(number))
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.scheduler.step()
        return float(loss.detach())

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        """DDP has no mixed precision of its own: autocast is how torch does it there."""
        import torch

        if self.cell.strategy != "ddp" or not self.precision.mixed:
            return contextlib.nullcontext()
        return torch.autocast(torch.device(self.world.device).type, dtype=getattr(torch, self.precision.compute))

    def _options(self) -> Any:
        from torch.distributed.checkpoint.state_dict import StateDictOptions

        # No cpu_offload: on CPU FSDP1's own offload crashes (https://github.com/pytorch/pytorch/issues/188989).
        return StateDictOptions(full_state_dict=self.cell.option("state_dict") == "full")

    def _state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.model, self.optimizer, options=self._options())
        return {"model": model, "optimizer": optimizer, "scheduler": self.scheduler.state_dict()}

    def save(self, directory: Path) -> None:
        """One DCP checkpoint, or one file written by rank 0 for state_dict=full."""
        import torch
        from torch.distributed.checkpoint.state_dict_saver import save

        state = self._state()
        if self.cell.option("state_dict") == "full":
            if self.world.rank == 0:
                torch.save(state, directory / "checkpoint.pt")
            return
        save(state, checkpoint_id=directory)

    def load(self, directory: Path) -> None:
        """DCP fills the state in place; then it goes back by ``set_state_dict``."""
        import torch
        from torch.distributed.checkpoint.state_dict import set_state_dict
        from torch.distributed.checkpoint.state_dict_loader import load

        if self.cell.option("state_dict") == "full":
            state = torch.load(directory / "checkpoint.pt", map_location="cpu", weights_only=True)
        else:
            state = self._state()
            load(state, checkpoint_id=directory)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=self._options(),
        )
        self.scheduler.load_state_dict(state["scheduler"])
