"""What the built-in drivers share: a tiny model, its optimizer and its learning-rate schedule."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_distcompat.drivers._base import Driver
from pytest_distcompat.models import MODELS, TinyModel
from pytest_distcompat.precisions import PRECISIONS, Precision
from pytest_distcompat.strategies import STRATEGIES, Strategy

if TYPE_CHECKING:
    import torch
    from torch.nn import Module

    from pytest_distcompat.cell import Cell
    from pytest_distcompat.models._base import Batch
    from pytest_distcompat.world import World


class TinyDriver(Driver):
    """A driver that trains one of the tiny models with AdamW under a decaying learning rate."""

    def __init__(self, cell: Cell, world: World) -> None:
        super().__init__(cell, world)
        self.strategy: Strategy = STRATEGIES.get(cell.strategy)
        self.precision: Precision = PRECISIONS.get(cell.precision)
        self.tiny: TinyModel = MODELS.get(str(cell.option("model")))

    @classmethod
    def unable(cls, cell: Cell, device: str = "cpu") -> str:
        """An option the driver does not speak, or one that makes no sense for the strategy."""
        return super().unable(cell, device) or STRATEGIES.get(cell.strategy).refuses(cell)

    def plain_model(self) -> Module:
        """The tiny model from a fixed seed, in the precision's load dtype (buffers keep their own)."""
        import torch

        torch.manual_seed(0)
        model = self.tiny.make()
        load = getattr(torch, self.precision.load)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(load)
        return model

    def make_optimizer(self, model: Module) -> torch.optim.Optimizer:
        """AdamW on the trainable parameters."""
        from torch.optim import AdamW

        return AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.01)

    def make_scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        """Every step multiplies the learning rate by 0.9, so that a scheduler left behind shows."""
        from torch.optim.lr_scheduler import StepLR

        return StepLR(optimizer, step_size=1, gamma=0.9)

    def batch(self, number: int) -> Batch:
        """This rank's batch of that step, on its device."""
        return {name: value.to(self.world.device) for name, value in self.tiny.batch(number, self.world.rank).items()}
