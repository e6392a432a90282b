"""Not collected here: test_suite_ranks.py copies it as ``my_trainer.py``, the driver that an adopter would write."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pytest_distcompat import Driver

if TYPE_CHECKING:
    from torch.nn import Module

    from pytest_distcompat import Cell


class Mine(Driver):
    """A plain module, wrapped by torch's own API."""

    libraries: ClassVar[tuple[str, ...]] = ("torch",)
    preload: ClassVar[tuple[str, ...]] = ("torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict")
    blocks = ("Linear",)

    @classmethod
    def unsupported_reason(cls, cell: Cell, device: str = "cpu") -> str | None:
        if cell.strategy not in {"ddp", "fsdp2"}:
            return f"my trainer has no {cell.strategy}"
        return super().unsupported_reason(cell, device)

    def build_model(self) -> Module:
        import torch
        from torch import nn

        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))

    def build(self, model: Module) -> None:
        import torch
        from torch import distributed
        from torch.distributed.fsdp import fully_shard
        from torch.nn.parallel import DistributedDataParallel

        distributed.init_process_group(self.world.backend)
        if self.cell.strategy == "ddp":
            self.model = DistributedDataParallel(model)
        else:
            for layer in model.children():
                fully_shard(layer)
            self.model = fully_shard(model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def step(self, number: int) -> float:
        import torch

        generator = torch.Generator().manual_seed(100 * number + self.world.rank)
        loss = self.model(torch.randn(4, 8, generator=generator)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())

    def _state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def save(self, directory: Path) -> None:
        from torch.distributed.checkpoint.state_dict_saver import save

        save(self._state(), checkpoint_id=directory)

    def load(self, directory: Path) -> None:
        from torch.distributed.checkpoint.state_dict import set_state_dict
        from torch.distributed.checkpoint.state_dict_loader import load

        state = self._state()
        load(state, checkpoint_id=directory)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


class Forgetful(Mine):
    """The driver above with a defect: it resumes with a fresh optimizer."""

    def load(self, directory: Path) -> None:
        from torch.distributed.checkpoint.state_dict import set_model_state_dict
        from torch.distributed.checkpoint.state_dict_loader import load

        state = {"model": self._state()["model"]}
        self.optimizer.state.clear()
        load(state, checkpoint_id=directory)
        set_model_state_dict(self.model, state["model"])
