"""Driver for the trainer: five methods. They import torch inside, so that collection is fast."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from pytest_distcompat import Driver

if TYPE_CHECKING:
    from torch import nn


class MyDriver(Driver):
    """my_trainer.Trainer on a tiny model."""

    name: ClassVar[str] = "my_trainer"
    #: Known issues of these are expected, whoever finds them.
    libraries: ClassVar[tuple[str, ...]] = ("torch",)
    preload: ClassVar[tuple[str, ...]] = ("my_trainer", "torch._dynamo")
    #: What FSDP is to cut the model into.
    blocks = ("Linear",)

    def build_model(self) -> nn.Module:
        import torch
        from torch import nn

        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        return model.to(torch.bfloat16 if self.cell.precision.startswith("bf16") else torch.float32)

    def build(self, model: nn.Module) -> None:
        import my_trainer
        import torch

        my_trainer.start(self.world.backend)
        mixed = torch.bfloat16 if self.cell.precision == "bf16_upcast" else None
        device = torch.device(self.world.device)
        self.trainer = my_trainer.Trainer(model, strategy=self.cell.strategy, dtype=mixed, device=device)
        self.model, self.optimizer = self.trainer.model, self.trainer.optimizer

    def step(self, number: int) -> float:
        import torch

        generator = torch.Generator().manual_seed(100 * number + self.world.rank)
        x = torch.randn(8, 4, generator=generator)
        return self.trainer.train_step(x.to(self.world.device), x[:, :2].to(self.world.device))

    def save(self, directory: Path) -> None:
        self.trainer.save(directory)

    def load(self, directory: Path) -> None:
        self.trainer.load(directory)
