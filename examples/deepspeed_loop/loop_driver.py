"""Driver for the loop: five methods."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from pytest_distcompat import Driver

if TYPE_CHECKING:
    from torch import nn


class LoopDriver(Driver):
    """loop.Loop on a tiny model."""

    name: ClassVar[str] = "loop"
    #: Known issues of these are expected, whoever finds them.
    libraries: ClassVar[tuple[str, ...]] = ("deepspeed", "torch")
    #: The last is what every ZeRO engine imports when it is made, seconds a run.
    preload: ClassVar[tuple[str, ...]] = ("deepspeed", "loop", "deepspeed.runtime.zero.muon.muon_optimizer")

    def build_model(self) -> nn.Module:
        import torch
        from torch import nn

        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 7), nn.ReLU(), nn.Linear(7, 3))
        return model.to(torch.bfloat16 if "bf16" in self.cell.precision else torch.float32)

    def build(self, model: nn.Module) -> None:
        import loop

        bf16 = "bf16" in self.cell.precision
        self.loop = loop.Loop(model, int(self.cell.strategy[-1]), bf16=bf16, backend=self.world.backend)
        self.model, self.optimizer = self.loop.engine, self.loop.optimizer

    def step(self, number: int) -> float:
        import torch

        generator = torch.Generator().manual_seed(100 * number + self.world.rank)
        x = torch.randn(8, 4, generator=generator).to(self.world.device)
        loss = self.loop.step(x.to(torch.bfloat16) if "bf16" in self.cell.precision else x, x[:, :3])
        self.grad_norm = float(self.model.get_global_grad_norm())
        return loss

    def save(self, directory: Path) -> None:
        self.loop.save(directory)

    def load(self, directory: Path) -> None:
        self.loop.load(directory)
