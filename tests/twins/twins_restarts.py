"""Trainers that resume once, and lose their place the second time or at the end of an epoch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_distcompat.drivers.accelerate import AccelerateDriver

from .declare import Torch, twin

if TYPE_CHECKING:
    from pathlib import Path


@twin(
    "restarts",
    "ddp-fp32-w2-grad_accum_2",
    "fsdp2-fp32-w2-grad_accum_2",
    match=r"^rank 0: loss 1 after the second load is [\d.]+; [\d.]+ in the run that never stopped\nrank 1: ",
)
class CountsStepsOfThisRun(Torch):
    """Saves how many steps this run has taken, and begins there: right once, and too early after a second load."""

    taken, place = 0, 0

    def step(self, number: int) -> float:
        self.taken += 1
        return super().step(self.place + self.taken - 1)

    def save(self, directory: Path) -> None:
        super().save(directory)
        (directory / f"taken_{self.world.rank}").write_text(str(self.taken), encoding="utf-8")

    def load(self, directory: Path) -> None:
        super().load(directory)
        self.place = int((directory / f"taken_{self.world.rank}").read_text(encoding="utf-8"))


@twin(
    "restarts",
    "ddp-fp32-w2-grad_accum_2",
    match=r"^exp_avg '[\w.]+' and \d+ others: other values after the second load",
)
class KeepsTheFirstSave(Torch):
    """Writes no checkpoint where it has written one already."""

    written = False

    def save(self, directory: Path) -> None:
        if not self.written:
            super().save(directory)
        self.written = True


@twin(
    "restarts",
    "zero1-fp32-w2-grad_accum_2",
    match=r"^rank 0: lr of the optimizer's group 0 is [\d.e-]+ in step 4 after the load; [\d.e-]+ in the run that never",
)
class RateOfThisRun(AccelerateDriver):
    """Lowers the learning rate after three steps of a run, as if it had begun with the first."""

    taken, loaded = 0, False

    def load(self, directory: Path) -> None:
        super().load(directory)
        self.loaded = True

    def step(self, number: int) -> float:
        loss = super().step(number)
        self.taken += 1
        if self.loaded and self.taken == 4:
            for group in _groups(self.optimizer):
                group["lr"] *= 0.5
        return loss


def _groups(optimizer: Any) -> Any:
    return optimizer.param_groups
