"""Twins of ``resume`` under ZeRO: DeepSpeed saves and loads its flat masters by code of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_distcompat.drivers.accelerate import AccelerateDriver

from .declare import CLIPPING, OBSERVERS, PARITY, twin
from .twins_resume import OTHER_DATA, RATE, halve

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch.nn import Module


NOT_LOADED = r"rank 1: the optimizer's state is empty after the load; 4 tensors were saved(?s:.*)loss 2 after the load"


# Without the optimizer DeepSpeed leaves the learning rate of its groups out too; ``midway`` runs in float32 alone.
@twin("resume", "zero1-fp32-w2-model_mlp", match=NOT_LOADED, also={"midway": RATE})
@twin("resume", "zero3-bf16_upcast-w2-model_mlp", match=NOT_LOADED)
class OptimizerNotLoadedZero(AccelerateDriver):
    """Loads the module alone with DeepSpeed."""

    def load(self, directory: Path) -> None:
        self.accelerator.load_state(str(directory), load_module_only=True, load_optimizer_states=False)


@twin(
    "resume", "zero2-fp32-w2-model_mlp", match=r"rank 1: scheduler is at 'last_epoch=0(?s:.*); saved at 'last_epoch=6"
)
class SchedulerNotLoadedZero(AccelerateDriver):
    """The learning rate starts again; accelerate steps the scheduler once for each rank."""

    def load(self, directory: Path) -> None:
        state = self.scheduler.state_dict()
        super().load(directory)
        self.scheduler.load_state_dict(state)


@twin(
    "resume",
    "zero2-bf16_upcast-w2-model_mlp",
    match=r"^rank 0: loss 1 after the load is [\d.]+; [\d.]+ in the run",
    also=OTHER_DATA,
)
class DataFromTheStartZero(AccelerateDriver):
    """Everything comes back but the place in the data."""

    taken = 0

    def step(self, number: int) -> float:
        self.taken += 1
        return super().step(self.taken - 1)


@twin(
    "resume",
    "zero1-fp32-w2-model_mlp",
    match=r"^rank 0: parameter 'module\.\S+' and 11 others: other values after the save",
    also={**PARITY, **CLIPPING, **OBSERVERS},
)
class SaveChangesZero(AccelerateDriver):
    """Saving changes what is trained; file and memory agree."""

    def save(self, directory: Path) -> None:
        halve(self.model.parameters())
        super().save(directory)


def masters(engine: Module) -> list[torch.nn.Parameter]:
    """DeepSpeed's flat partitions on this rank."""
    optimizer: Any = engine.optimizer
    return [parameter for group in optimizer.optimizer.param_groups for parameter in group["params"]]


@twin(
    "resume",
    "zero2-bf16_upcast-w2-model_mlp",
    match=r"^rank 0: optimizer state 'master of partition 0': other values after the load",
)
class MastersRounded(AccelerateDriver):
    """The live parameters are right and the masters behind them are not: float32 masters made anew from bfloat16."""

    def load(self, directory: Path) -> None:
        super().load(directory)
        for master in masters(self.model):
            master.data.copy_(master.data.bfloat16())
