"""Trainers with one wrong call, which only a walk makes."""

from __future__ import annotations

import copy
from typing import Any, ClassVar, Literal

from pytest_distcompat.calls import observer
from pytest_distcompat.drivers.accelerate import AccelerateCalls, AccelerateDriver
from pytest_distcompat.drivers.deepspeed import DeepSpeedCalls, DeepSpeedDriver
from pytest_distcompat.drivers.torch import TorchCalls, TorchDriver
from pytest_distcompat.live_calls import Calls


class CastingCalls(TorchCalls):
    """``unwrap`` casts the model that is trained."""

    @observer
    def unwrap(self) -> Any:
        self.model.module.blocks.bfloat16()


class DetachingCalls(TorchCalls):
    """``state_dict`` leaves other masters in the optimizer than those of the model."""

    @observer
    def state_dict(self) -> Any:  # type: ignore[override]  # one form is enough
        group = self.trainer.optimizer.param_groups[0]
        group["params"] = [parameter.detach().clone() for parameter in group["params"]]


class MissingCalls(TorchCalls):
    """``zero_grad`` misses a group."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        missed = list(self.part("outlet"))
        kept = [parameter.grad for parameter in missed]
        super().zero_grad(set_to_none)
        for parameter, gradient in zip(missed, kept, strict=True):
            parameter.grad = gradient


class RewindingCalls(TorchCalls):
    """``load`` takes the optimizer's state from the checkpoint too where it is to leave it as it is."""

    def load(self, optimizer: bool = True, scheduler: bool = True) -> None:
        super().load(scheduler=scheduler)


class StaleCalls(AccelerateCalls):
    """``unwrap_model`` returns a copy that the first call made."""

    kept: Any = None

    @observer
    def unwrap_model(self) -> Any:  # type: ignore[override]  # one form is enough
        self.kept = self.kept or copy.deepcopy(super().unwrap_model())
        return self.kept


class RoundingCalls(AccelerateCalls):
    """``export`` writes weights that were rounded to bfloat16, without the last layer's bias."""

    @observer
    def export(self) -> Any:  # type: ignore[override]  # one form is enough
        full_state = {
            name: tensor.bfloat16().float() for name, tensor in self.accelerator.get_state_dict(self.model).items()
        }
        full_state.pop("outlet.bias")
        self.exports.mkdir(parents=True, exist_ok=True)
        self.accelerator.save(full_state, self.exports / "model.safetensors", safe_serialization=True)
        return self.written("model.safetensors")


class ForgettingCalls(TorchCalls):
    """``optimizer_state`` has half of each moment."""

    @observer
    def optimizer_state(self, how: Any = "full_state_dict") -> Any:
        return {name: tensor / 2 for name, tensor in super().optimizer_state(how).items()}


class SummingCalls(DeepSpeedCalls):
    """``accessors`` adds gradients up over the ranks, whose mean the trainer takes."""

    @observer
    def accessors(self, of: Literal["fp32_param", "optimizer_state", "grad"] = "grad") -> Any:
        return {name: accessor * self.trainer.world.size for name, accessor in super().accessors(of).items()}


class Casting(TorchDriver):
    live_calls: ClassVar[type[TorchCalls]] = CastingCalls


class Detaching(TorchDriver):
    live_calls: ClassVar[type[TorchCalls]] = DetachingCalls


class Missing(TorchDriver):
    live_calls: ClassVar[type[TorchCalls]] = MissingCalls


class Rewinding(TorchDriver):
    live_calls: ClassVar[type[TorchCalls]] = RewindingCalls


class Forgetting(TorchDriver):
    live_calls: ClassVar[type[TorchCalls]] = ForgettingCalls


class Summing(DeepSpeedDriver):
    live_calls: ClassVar[type[Calls]] = SummingCalls


class Stale(AccelerateDriver):
    live_calls: ClassVar[type[Calls]] = StaleCalls


class Rounding(AccelerateDriver):
    live_calls: ClassVar[type[Calls]] = RoundingCalls
