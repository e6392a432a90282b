"""Suites over nodes, sound and not; test_suites.py copies it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from tests.plugin.adopter import Mine

from pytest_distcompat import CompatSuite, Matrix

if TYPE_CHECKING:
    from pathlib import Path


class TestSound(CompatSuite):
    driver = "tests.plugin.adopter:Mine"
    matrix = Matrix(("ddp", "fsdp2"), ("fp32",), world_sizes=(2, 3))


class TestSpread(TestSound):
    matrix = Matrix(("ddp",), ("fp32",), world_sizes=(2, 3), nodes=2)


class Raises(Mine):
    def save(self, directory: Path) -> None:
        if self.world.rank == 1:
            raise ValueError("the cause")
        super().save(directory)


class Hangs(Mine):
    def step(self, number: int) -> float:
        if self.world.rank == 1 and number == 1:
            time.sleep(600)
        return super().step(number)


class Drifts(Mine):
    def step(self, number: int) -> float:
        import torch

        loss = super().step(number)
        if self.world.rank == 1:
            with torch.no_grad():
                next(iter(self.model.parameters())).add_(1.0)
        return loss


class TestRaises(CompatSuite):
    driver = f"{__name__}:Raises"
    matrix = Matrix(("ddp",), ("fp32",))


class TestHangs(TestRaises):
    driver = f"{__name__}:Hangs"


class TestDrifts(TestRaises):
    driver = f"{__name__}:Drifts"
