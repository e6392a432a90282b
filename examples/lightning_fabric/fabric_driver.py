"""Five methods around the loop, and its loss and optimizer for `parity`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from pytest_distcompat import Driver

if TYPE_CHECKING:
    import torch
    from torch import nn

#: Cell to Fabric.
PRECISIONS = {"fp32": "32-true", "bf16_upcast": "bf16-mixed", "bf16_pure": "bf16-true"}


class FabricDriver(Driver):
    """fabric_loop.FabricLoop on a tiny model."""

    name: ClassVar[str] = "fabric_loop"
    libraries: ClassVar[tuple[str, ...]] = ("torch",)
    preload: ClassVar[tuple[str, ...]] = ("fabric_loop", "torch._dynamo")
    blocks = ("Linear",)
    max_norm = 1.0

    def build_model(self) -> nn.Module:
        import torch
        from torch import nn

        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        return model.to(torch.bfloat16 if self.cell.precision == "bf16_pure" else torch.float32)

    def build(self, model: nn.Module) -> None:
        from fabric_loop import FabricLoop

        self.loop = FabricLoop(
            model,
            strategy=self.cell.strategy,
            precision=PRECISIONS[self.cell.precision],
            device=self.world.device.partition(":")[0],
            ranks=self.world.size,
        )
        # What is inside Fabric's own wrapper has a private name: in public is the bare model only, which is inside DDP's.
        self.model, self.optimizer = self.loop.model._forward_module, self.loop.optimizer  # noqa: SLF001

    def batch(self, number: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs, and what is to be learned of them."""
        import torch

        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(100 * number + rank)).to(self.world.device)
        return x, x[:, :2]

    def step(self, number: int) -> float:
        loss = self.loop.train_step(*self.batch(number, self.world.rank))
        self.grad_norm = self.loop.norm
        return loss

    def loss(self, model: nn.Module, number: int, rank: int) -> torch.Tensor:
        from torch import nn

        x, wanted = self.batch(number, rank)
        return nn.functional.mse_loss(model(x).float(), wanted)

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        import torch

        return torch.optim.AdamW(model.parameters(), lr=3e-3)

    def save(self, directory: Path) -> None:
        self.loop.save(directory / "state.ckpt")

    def load(self, directory: Path) -> None:
        self.loop.load(directory / "state.ckpt")
