"""Eight trainers, each wrong in one way: what the terminal says of them is to be short (see ../test_broken.py)."""

from __future__ import annotations

import logging
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch

from pytest_distcompat.drivers.torch import TorchDriver


class StaleOptimizer(TorchDriver):
    """The optimizer is made of the parameters that ``fully_shard`` replaces; torch then fails to save it."""

    early: Any = None

    def build(self, model: Any) -> None:
        self.early = super().make_optimizer(model)
        super().build(model)

    def make_optimizer(self, model: Any) -> Any:
        return self.early or super().make_optimizer(model)


class Hangs(TorchDriver):
    """Rank 1 sleeps in its third step."""

    def step(self, number: int) -> float:
        if self.world.rank == 1 and number == 2:
            time.sleep(3600)
        return super().step(number)


class FailsToLoad(TorchDriver):
    """All ranks fail in the same line."""

    def load(self, directory: Path) -> None:
        print(f"rank {self.world.rank} looks for {directory.name}")
        logging.getLogger(__name__).warning("no checkpoint.index in %s", directory.name)
        raise FileNotFoundError("the checkpoint has no checkpoint.index")


class SavesPrefixed(TorchDriver):
    """The names in files have the prefix of torch.compile."""

    def _state(self) -> dict[str, Any]:
        state = super()._state()
        return state | {"model": {f"_orig_mod.{name}": value for name, value in state["model"].items()}}


class SumsRanks(TorchDriver):
    """Gradients are added up over the ranks."""

    def update(self) -> None:
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(self.world.size)
        super().update()


class Killed(TorchDriver):
    """Rank 1 is killed in its second step."""

    def step(self, number: int) -> float:
        if self.world.rank == 1 and number == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(number)


class ForgetsScheduler(TorchDriver):
    """A resumed run begins its schedule anew."""

    def load(self, directory: Path) -> None:
        fresh = self.scheduler.state_dict()
        super().load(directory)
        self.scheduler.load_state_dict(fresh)


class AllBfloat16(TorchDriver):
    """The model is bfloat16 whatever the cell says."""

    def build(self, model: Any) -> None:
        super().build(model.to(torch.bfloat16))
