"""Not collected here: test_suites.py copies it; suites whose trainers have a fault on one rank, in one action."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from tests.plugin.adopter import Mine

from pytest_distcompat import CompatSuite, Matrix
from pytest_distcompat.expect import Expectation, fails, refuses

if TYPE_CHECKING:
    from torch.nn import Module

SIZE = int(os.environ.get("FAULTS_WORLD_SIZE", "2"))
DDP = Matrix(strategies=("ddp",), precisions=("fp32",), world_sizes=(SIZE,))


class Raises(Mine):
    def step(self, number: int) -> float:
        if self.world.rank == 1 and number == 1:
            raise ValueError("the cause")
        return super().step(number)


class RaisesInBuild(Mine):
    def build(self, model: Module) -> None:
        super().build(model)
        if self.world.rank == 1:
            raise ValueError("not with me")


class Refuses(Mine):
    def build(self, model: Module) -> None:
        raise ValueError("not with us")


class Killed(Mine):
    def step(self, number: int) -> float:
        if self.world.rank == 1 and number == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(number)


class Segfault(Mine):
    def load(self, directory: Path) -> None:
        if self.world.rank == 1:
            ctypes.string_at(0)
        super().load(directory)


class ExitsWith0(Mine):
    def save(self, directory: Path) -> None:
        if self.world.rank == 1:
            os._exit(0)
        super().save(directory)


class Asleep(Mine):
    def step(self, number: int) -> float:
        if self.world.rank == 1 and number == 1:
            time.sleep(600)
        return super().step(number)


class OtherCollective(Mine):
    def step(self, number: int) -> float:
        import torch
        from torch import distributed

        if self.world.rank == 1 and number == 1:
            distributed.all_gather_object([None] * SIZE, torch.ones(2))
        return super().step(number)


class TestWell(CompatSuite):
    matrix = DDP
    driver = f"{__name__}:Mine"


class TestRaises(CompatSuite):
    matrix = DDP
    driver = f"{__name__}:Raises"


class TestRaisesInBuild(CompatSuite):
    matrix = DDP
    driver = f"{__name__}:RaisesInBuild"


class TestRefusesAlone(CompatSuite):
    matrix = DDP
    driver = f"{__name__}:RaisesInBuild"
    expect: ClassVar[tuple[Expectation, ...]] = (refuses("names", match="not with me"),)


class TestRefuses(CompatSuite):
    matrix = DDP
    driver = f"{__name__}:Refuses"
    expect: ClassVar[tuple[Expectation, ...]] = (refuses("names", match="not with us"),)


class TestKilled(CompatSuite):
    matrix = DDP
    driver = f"{__name__}:Killed"


class TestKnown(CompatSuite):
    matrix = DDP
    driver = f"{__name__}:Killed"
    expect: ClassVar[tuple[Expectation, ...]] = (fails("names", reason="known"),)


class TestSegfault(CompatSuite):
    matrix = DDP
    driver = f"{__name__}:Segfault"


class TestExitsWith0(CompatSuite):
    matrix = DDP
    driver = f"{__name__}:ExitsWith0"


class TestAsleep(CompatSuite):
    matrix = DDP
    driver = f"{__name__}:Asleep"


class TestOtherCollective(CompatSuite):
    matrix = DDP
    driver = f"{__name__}:OtherCollective"
