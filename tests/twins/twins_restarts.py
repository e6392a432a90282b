"""Trainers that resume once, and lose their place the second time or at the end of an epoch."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any
from unittest import mock

from pytest_distcompat.drivers.accelerate import AccelerateDriver
from pytest_distcompat.drivers.deepspeed import DeepSpeedDriver
from pytest_distcompat.drivers.trainer import TrainerDriver

from .declare import Torch, twin

if TYPE_CHECKING:
    from pathlib import Path

    from torch.nn import Module

    from pytest_distcompat.driver import OnAction, Plan


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


@twin(
    "restarts",
    "zero1-fp32-w2-grad_accum_2",
    match=r"^exp_avg '[\w.]+' and \d+ others: other values after the load of the first of two saves",
)
class WritesOverTheFirstSave(DeepSpeedDriver):
    """Names each checkpoint, and writes the second one over the first, too."""

    def save(self, directory: Path) -> None:
        from torch import distributed

        super().save(directory)
        distributed.barrier()
        if self.world.rank == 0:
            first, *others = sorted(directory.glob("global_step*"))
            for other in others:
                shutil.copytree(other, first, dirs_exist_ok=True)
        distributed.barrier()


@twin(
    "restarts",
    "zero0-fp32-w2-model_llama_dropout-grad_accum_2",
    match=r"^rank [01]: loss \d after the load of the first of two saves is [\d.]+; [\d.]+ in the run that never",
)
class KeepsTheLastRandomState(DeepSpeedDriver):
    """Writes each rank's random state over the one that it saved before: dropout goes on elsewhere."""

    def save(self, directory: Path) -> None:
        super().save(directory)
        state = f"rng_{self.world.rank}.pt"
        first, *later = sorted(directory.glob(f"global_step*/{state}"))
        for newer in later:
            shutil.copy(newer, first)


@twin(
    "restarts",
    "ddp-fp32-w2-model_mlp-grad_accum_2-set_TrainingArguments.save_total_limit=2",
    match=r"raised RuntimeError: Trainer goes on after 6 steps; expected 4",
)
class KeepsOneTooFew(TrainerDriver):
    """Removes the first of two checkpoints, which was to be kept."""

    def save_limit(self) -> Any:
        from transformers import trainer

        def rotate(*arguments: Any, save_total_limit: int | None = None, **more: Any) -> None:
            limit = save_total_limit and save_total_limit - 1
            sound(*arguments, save_total_limit=limit, **more)

        sound = trainer.rotate_checkpoints
        return mock.patch.object(trainer, "rotate_checkpoints", rotate)

    def train(self, model: Module, plan: Plan, report: OnAction) -> None:
        with self.save_limit():
            super().train(model, plan, report)


def _groups(optimizer: Any) -> Any:
    return optimizer.param_groups
