"""Trainers that keep more than they need, or are slow."""

from __future__ import annotations

import time
from typing import ClassVar

from pytest_distcompat.cost import WARM_UP
from pytest_distcompat.drivers.accelerate import AccelerateDriver

from .declare import CLIPPING, GRADIENTS, PARITY, UNCUT, Torch, name_of, twin
from .twins_active import NoShard
from .twins_optimizer_frozen import Thawed

# The same defects as elsewhere: what they cost is one more thing to see them by.
twin(
    "memory",
    "fsdp1-fp32-w2-model_mlp",
    match=r"^all ranks together keep 1180 elements of '\w+'; 590 elements are trained, expected 590",
    also={**UNCUT, "active": r"shards are in 2 copies \(rank 0; rank 1\); expected 1, of several ranks"},
)(NoShard)
twin(
    "memory",
    "zero1-fp32-w2-model_mlp",
    match=r"^all ranks together keep 772 elements of 'exp_avg'; 590 elements are trained, expected 590",
    also={
        **PARITY,
        **CLIPPING,
        "optimizer": r"frozen parameter 'module\.frozen\.weight' moved",
        "names": r"the optimizer keeps state for 'frozen\.bias', which is no trainable",
        "start": r"^rank 0: parameter 'frozen\.bias' and 1 others: trainable after build; frozen when loaded",
    }
    | GRADIENTS,
)(Thawed)


SLOW = r"tokens a second and rank, 0\.\d\d of ddp's [\d.e+]+; expected at least 0\.1 of it"


def dawdle(driver: Torch | AccelerateDriver, number: int, seconds: float) -> None:
    """Where it counts: not while things settle. The baseline waits as the sound trainer does.

    Beside that wait a busy machine's part of a step is small.
    """
    if number >= WARM_UP:
        time.sleep(0.03 if driver.cell.strategy == "ddp" else seconds)


class Steady(Torch):
    """Each step waits as long as the baseline's."""

    seconds: ClassVar[float] = 0.03

    def step(self, number: int) -> float:
        dawdle(self, number, self.seconds)
        return super().step(number)


class SteadyZero(AccelerateDriver):
    """The same with ZeRO's flat masters."""

    seconds: ClassVar[float] = 0.03

    def step(self, number: int) -> float:
        dawdle(self, number, self.seconds)
        return super().step(number)


@twin("throughput", "fsdp2-fp32-w2-model_mlp", match=SLOW, sound=name_of(Steady))
class Slow(Steady):
    """Every step waits for something."""

    seconds = 0.8


@twin("throughput", "zero1-fp32-w2-model_mlp", match=SLOW, sound=name_of(SteadyZero))
class SlowZero(SteadyZero):
    """The twin above with ZeRO's flat masters."""

    seconds = 0.8
