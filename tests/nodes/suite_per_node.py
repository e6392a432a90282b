"""Suites whose nodes have checkpoints of their own, of trainers that save on each and on the first alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pytest_distcompat import CompatSuite, Matrix
from pytest_distcompat.drivers.deepspeed import DeepSpeedDriver
from pytest_distcompat.drivers.torch import TorchDriver
from pytest_distcompat.drivers.trainer import TrainerDriver

if TYPE_CHECKING:
    from pathlib import Path

    from pytest_distcompat.driver import Plan

MLP = {"model": "mlp", "checkpoints": "node"}
WHOLE = {**MLP, "state_dict": "full"}
LLAMA = {"checkpoints": "node"}


class TestTorch(CompatSuite):
    driver = "torch"
    matrix = Matrix(
        ("ddp",), ("fp32",), options=(MLP,), extra=(Matrix(("fsdp1", "fsdp2"), ("fp32",), options=(WHOLE,)),)
    )


class TestAccelerate(CompatSuite):
    driver = "accelerate"
    matrix = Matrix(
        ("ddp", "zero1", "zero2", "zero3"),
        ("fp32",),
        options=(MLP,),
        extra=(Matrix(("fsdp2",), ("fp32",), options=(WHOLE,)),),
    )


class TestTrainer(CompatSuite):
    driver = "trainer"
    matrix = Matrix(
        ("ddp",),
        ("fp32",),
        options=(MLP, {**MLP, "save_only_model": True}, LLAMA),
        extra=(Matrix(("zero2", "zero3"), ("fp32",), options=(LLAMA,)),),
    )


class TestDeepSpeed(CompatSuite):
    driver = "deepspeed"
    matrix = Matrix(
        ("zero0", "zero1"),
        ("fp32",),
        options=(MLP,),
        extra=(Matrix(("zero2", "zero3"), ("fp32", "bf16_upcast"), options=(MLP,)),),
    )


class OnFirstNode(TorchDriver):
    """Saves on rank 0 alone."""

    def save(self, directory: Path) -> None:
        if self.world.rank == 0:
            super().save(directory)
        else:
            self._state()


class TestOnFirstNode(CompatSuite):
    driver = f"{__name__}:OnFirstNode"
    matrix = Matrix(("ddp",), ("fp32",), options=(MLP,))


class OtherKeysElsewhere(TorchDriver):
    """Saves other names where rank 0 is not."""

    def _state(self) -> dict[str, Any]:
        state = super()._state()
        prefix = "module." if self.world.rank else ""
        return {**state, "model": {f"{prefix}{name}": value for name, value in state["model"].items()}}


class TestOtherKeysElsewhere(CompatSuite):
    driver = f"{__name__}:OtherKeysElsewhere"
    matrix = Matrix(("ddp",), ("fp32",), options=(MLP,))


class TrainerOnFirstNode(TrainerDriver):
    """Was not told to save on each node."""

    def arguments(self, plan: Plan) -> dict[str, Any]:
        return {**super().arguments(plan), "save_on_each_node": False}


class TestTrainerOnFirstNode(CompatSuite):
    driver = f"{__name__}:TrainerOnFirstNode"
    matrix = Matrix(("ddp",), ("fp32",), options=(MLP,))


class Untagged(DeepSpeedDriver):
    """Loads what DeepSpeed notes as the latest, on the node of rank 0 alone."""

    tag: ClassVar[dict[str, str]] = {}


class TestUntagged(CompatSuite):
    driver = f"{__name__}:Untagged"
    matrix = Matrix(("zero2", "zero3"), ("fp32",), options=(MLP,))
