"""Defects of trainers on a model of their own, which rounds more than the built-in ones: how much more is measured beside."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pytest_distcompat import Driver

from .declare import CLIPPING, GRADIENTS, twin

if TYPE_CHECKING:
    import torch
    from torch.nn import Module

#: The table allows 1e-3 in bfloat16, and the sound trainer is off by 1.9e-3.
OFF = r"^step \d+: the loss is .* in the reference \(.* off, 3\.\de-03 allowed\)"


class SmallNet(Driver):
    """A regression by two small layers, under autocast. Its loss is the mean of 16 squares: rounding shows."""

    name: ClassVar[str] = "small_net"
    libraries: ClassVar[tuple[str, ...]] = ("torch",)
    preload: ClassVar[tuple[str, ...]] = ("torch._dynamo", "torch.distributed.fsdp")
    blocks = ("Linear",)

    def build_model(self) -> Module:
        import torch
        from torch import nn

        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))

    def optimizer_of(self, model: Module) -> torch.optim.Optimizer:
        """AdamW, a large learning rate."""
        import torch

        return torch.optim.AdamW(model.parameters(), lr=3e-3)

    def loss(self, model: Module, number: int, rank: int) -> torch.Tensor:
        """Of batch ``number`` of a rank."""
        import torch

        generator = torch.Generator().manual_seed(100 * number + rank)
        x = torch.randn(8, 4, generator=generator)
        return torch.nn.functional.mse_loss(model(x).float(), x[:, :2])

    def build(self, model: Module) -> None:
        from torch import distributed
        from torch.distributed.fsdp import fully_shard
        from torch.nn.parallel import DistributedDataParallel

        distributed.init_process_group(self.world.backend)
        if self.cell.strategy == "ddp":
            self.model = DistributedDataParallel(model)
        else:
            for layer in (model.get_submodule("0"), model.get_submodule("2")):
                fully_shard(layer)
            self.model = fully_shard(model)
        self.optimizer = self.optimizer_of(self.model)

    def step(self, number: int) -> float:
        import torch

        with torch.autocast("cpu", torch.bfloat16):
            loss = self.loss(self.model, number, self.world.rank)
        return self.update(loss, self.model)

    def update(self, loss: Any, model: Module) -> float:
        """From the loss to the next weights."""
        import torch

        self.optimizer.zero_grad()
        loss.backward()
        norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        self.grad_norm = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        self.optimizer.step()
        return float(loss.detach())

    def reference(self, model: Module, number: int, ranks: int) -> float:
        self.optimizer = self.optimizer or SmallNet.optimizer_of(self, model)
        losses = [self.loss(model, number, rank) for rank in range(ranks)]
        return SmallNet.update(self, sum(losses[1:], losses[0]) / ranks, model)

    def save(self, directory: Path) -> None:
        """No run of these twins loads it."""
        from torch.distributed.checkpoint.state_dict import get_state_dict
        from torch.distributed.checkpoint.state_dict_saver import save

        model, optimizer = get_state_dict(self.model, self.optimizer)
        save({"model": model, "optimizer": optimizer}, checkpoint_id=directory)


SOUND = f"{SmallNet.__module__}:{SmallNet.__name__}"


@twin("parity", "ddp-bf16_upcast-w2", "fsdp2-bf16_upcast-w2", match=OFF, also=CLIPPING, sound=SOUND)
class SmallDecay(SmallNet):
    """Weights decay three hundred times as fast as asked, and the optimizer's groups do not say so."""

    def update(self, loss: Any, model: Module) -> float:
        import torch

        updated = super().update(loss, model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 - 3e-3 * 3.0)
        return updated


@twin(
    "parity",
    "ddp-bf16_upcast-w2",
    "fsdp2-bf16_upcast-w2",
    match=r"^step 1: rank 0: the gradient norm is .* \(1\.0e\+00 off, [2-9]\.\de-02 allowed\)",
    also=CLIPPING | GRADIENTS,
    sound=SOUND,
)
class SmallSums(SmallNet):
    """Gradients are added up over the ranks: AdamW hides it, and clipping bites more often."""

    def update(self, loss: Any, model: Module) -> float:
        return super().update(loss * self.world.size, model) / self.world.size
