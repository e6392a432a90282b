"""Trainers that keep more than they need, or are slow."""

from __future__ import annotations

import time

from pytest_distcompat.drivers.accelerate import AccelerateDriver

from .declare import CLIPPING, GRADIENTS, PARITY, UNCUT, Torch, twin
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
    }
    | GRADIENTS,
)(Thawed)


def dawdle(driver: Torch | AccelerateDriver, number: int) -> None:
    """Where it counts: not in the baseline, and not while things settle."""
    if driver.cell.strategy != "ddp" and number >= 8:
        time.sleep(0.3)


SLOW = r"tokens a second and rank, 0\.\d\d of ddp's [\d.e+]+; expected at least 0\.1 of it"


@twin("throughput", "fsdp2-fp32-w2-model_mlp", match=SLOW)
class Slow(Torch):
    """Every step waits for something."""

    def step(self, number: int) -> float:
        dawdle(self, number)
        return super().step(number)


@twin("throughput", "zero1-fp32-w2-model_mlp", match=SLOW)
class SlowZero(AccelerateDriver):
    """The twin above with ZeRO's flat masters."""

    def step(self, number: int) -> float:
        dawdle(self, number)
        return super().step(number)
