"""Trainers with one wrong call, which only a walk makes."""

from __future__ import annotations

from typing import Any, ClassVar

from pytest_distcompat.calls import observer
from pytest_distcompat.drivers.torch import TorchCalls, TorchDriver


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


class Casting(TorchDriver):
    walk_calls: ClassVar[type[TorchCalls]] = CastingCalls


class Detaching(TorchDriver):
    walk_calls: ClassVar[type[TorchCalls]] = DetachingCalls


class Missing(TorchDriver):
    walk_calls: ClassVar[type[TorchCalls]] = MissingCalls


class Rewinding(TorchDriver):
    walk_calls: ClassVar[type[TorchCalls]] = RewindingCalls
