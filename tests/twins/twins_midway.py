"""Trainers whose evaluation between two steps changes what is trained after it."""

from __future__ import annotations

from typing import Any, ClassVar

from pytest_distcompat.calls import observer
from pytest_distcompat.drivers.accelerate import AccelerateCalls, AccelerateDriver
from pytest_distcompat.drivers.deepspeed import DeepSpeedCalls, DeepSpeedDriver
from pytest_distcompat.drivers.torch import TorchCalls, TorchDriver
from pytest_distcompat.live_calls import Calls

from .declare import GRADIENTS, PARITY, twin


class StayingCalls(TorchCalls):
    """``evaluate`` leaves the model in evaluation mode."""

    @observer
    def evaluate(self) -> Any:  # type: ignore[override]  # one context is enough
        outputs = super().evaluate()
        self.model.eval()
        return outputs


@twin(
    "midway",
    "ddp-fp32-w2-model_dropout",
    "fsdp2-fp32-w2-model_dropout",
    match=r"^rank 0: the whole model is in evaluation mode in the step after the evaluation; in training mode before it\n"
    r"(?s:.*)\nrank 0: the loss of the step after the evaluation is [\d.]+; [\d.]+ in the run that never evaluated",
)
class StaysInEvaluationMode(TorchDriver):
    """No ``model.train()`` after an evaluation: nothing is dropped any more."""

    live_calls: ClassVar[type[Calls]] = StayingCalls


RATE = r"^rank 0: lr of the optimizer's group 0 is [\d.e-]+ after step {} of the resumed run; [\d.e-]+ in the run that never"


@twin(
    "midway",
    "ddp-fp32-w2",
    match=rf"(?s){RATE.format(1)}(?!.*\b(loss|step [23])\b)",
    also={"resume": RATE.format(1), **PARITY, **GRADIENTS},
)
class ScheduleFromTheStart(TorchDriver):
    """A schedule of its own, set at the end of each step, whose count is in no checkpoint."""

    taken = 0

    def step(self, number: int) -> float:
        loss = super().step(number)
        self.taken += 1
        for group in self.optimizer.param_groups:
            group["lr"] *= 1 - 0.1 * min(self.taken, 5)
        return loss


class RestartingCalls(TorchCalls):
    """``evaluate`` sets back the count of the trainer's own schedule."""

    @observer
    def evaluate(self) -> Any:  # type: ignore[override]  # one context is enough
        self.trainer.taken = 0
        return super().evaluate()


class OwnSchedule(TorchDriver):
    """A schedule of its own, whose count is the step's number."""

    def step(self, number: int) -> float:
        loss = super().step(number)
        self.taken = max(getattr(self, "taken", number), 0) + 1
        for group in self.optimizer.param_groups:
            group["lr"] = 0.01 / self.taken
        return loss


@twin(
    "midway",
    "ddp-fp32-w2",
    match=RATE.format(3),
    sound="twins.twins_midway:OwnSchedule",
    also={**PARITY, **GRADIENTS},
)
class RestartsItsSchedule(OwnSchedule):
    """An evaluation begins its own schedule anew."""

    live_calls: ClassVar[type[Calls]] = RestartingCalls


class ShufflingCalls(AccelerateCalls):
    """``evaluate`` draws the order of rows from the generator of the training."""

    @observer
    def evaluate(self) -> Any:  # type: ignore[override]  # one context is enough
        import torch

        torch.randperm(4)
        return super().evaluate()


@twin(
    "midway",
    "ddp-fp32-w2",
    "zero3-fp32-w2",
    match=r"^rank 0: the random state is another after the evaluation",
)
class ShufflesByTheSameGenerator(AccelerateDriver):
    """The loader of the evaluation shuffles, and was given no generator of its own."""

    live_calls: ClassVar[type[Calls]] = ShufflingCalls


class RoundingCalls(DeepSpeedCalls):
    """``evaluate`` casts the model to bfloat16 and back."""

    @observer
    def evaluate(self) -> Any:  # type: ignore[override]  # one context is enough
        outputs = super().evaluate()
        for parameter in self.model.module.parameters():
            parameter.data = parameter.data.bfloat16().float()
        return outputs


@twin(
    "midway",
    "zero1-fp32-w2",
    match=r"^rank 0: parameter '.*' and \d+ others: other values after the evaluation",
)
class EvaluatesInBfloat16(DeepSpeedDriver):
    """``model.bfloat16()`` for a quick evaluation, and ``model.float()`` after it."""

    live_calls: ClassVar[type[Calls]] = RoundingCalls
