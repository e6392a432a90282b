"""torch's own ZeRO-1, an optimizer beside DDP, and how its ranks come to share nothing out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from .declare import Torch, twin

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.nn import Module

SOUND = "twins.twins_zero_redundancy:SharedOut"


class SharedOut(Torch):
    """https://docs.pytorch.org/docs/stable/distributed.optim.html: each rank keeps and updates its part of the parameters."""

    portable: ClassVar[Mapping[str, str]] = {}

    def make_optimizer(self, model: Module) -> Any:
        from torch.distributed.optim import ZeroRedundancyOptimizer
        from torch.optim import AdamW

        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        # The reference has no process group.
        if self.world.size == 1:
            return AdamW(trained, lr=3e-3)
        return ZeroRedundancyOptimizer(trained, AdamW, process_group=self.group(), lr=3e-3)

    def group(self) -> Any:
        """Who shares the state out."""
        from torch import distributed

        return distributed.group.WORLD

    def save(self, directory: Path) -> None:
        import torch

        if self.world.size > 1:
            self.optimizer.consolidate_state_dict(to=0)
        if self.world.rank == 0:
            parts = {"model": self.wrapped.module, "optimizer": self.optimizer, "scheduler": self.scheduler}
            state = {name: part.state_dict() for name, part in parts.items()}
            torch.save(state, directory / "checkpoint.pt")
        self.save_random(directory)

    def load(self, directory: Path) -> None:
        import torch

        state = torch.load(directory / "checkpoint.pt", weights_only=True)
        self.wrapped.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.load_random(directory, required=True)


@twin(
    "memory",
    "ddp-fp32-w2-model_mlp",
    match=r"all ranks together keep 1180 elements of 'exp_avg'; 590 elements are trained, expected 590",
    sound=SOUND,
)
class EachForItself(SharedOut):
    """The group is that of one rank: all is right but what it costs."""

    def group(self) -> Any:
        from torch import distributed

        return [distributed.new_group([rank]) for rank in range(self.world.size)][self.world.rank]


@twin(
    "resume",
    "ddp-fp32-w2-model_mlp",
    match=r"rank 1: the optimizer's state is empty after the load; \d+ tensors were saved",
    sound=SOUND,
)
class OnlyTheFirstPart(SharedOut):
    """Nobody calls ``load_state_dict`` but rank 0: the others go on from nothing."""

    def load(self, directory: Path) -> None:
        super().load(directory)
        if self.world.rank:
            self.optimizer.optim.state.clear()
