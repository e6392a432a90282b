"""Trainers whose loss scale begins as torch's does, too large, which is sound; and a scaler that skips what it must not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest import mock

from pytest_distcompat.drivers.accelerate import AccelerateDriver
from pytest_distcompat.drivers.trainer import TrainerDriver

from .declare import CLIPPING, GRADIENTS, Torch, twin

if TYPE_CHECKING:
    from torch.nn import Module


class BeginsTooLarge(Torch):
    """No twin: at this scale the first steps overflow in float16, and are skipped until the scale fits."""

    def _scaler(self, device: str) -> Any:
        import torch

        return torch.amp.GradScaler(device, init_scale=2.0**24)


class AccelerateBeginsTooLarge(AccelerateDriver):
    """No twin: on the CPU accelerate makes no scaler, so this one has the scaler that it makes on a GPU."""

    def build(self, model: Module) -> None:
        import accelerate

        with mock.patch.object(accelerate, "Accelerator", scaled_accelerator()):
            super().build(model)


class TrainerBeginsTooLarge(TrainerDriver):
    """No twin: the same under Trainer."""

    def make_trainer(self, **settings: Any) -> Any:
        from transformers import trainer

        with mock.patch.object(trainer, "Accelerator", scaled_accelerator()):
            return super().make_trainer(**settings)


def scaled_accelerator() -> Any:
    """Return an Accelerator that does on the CPU in fp16 what it does on a GPU."""
    import accelerate
    import torch

    class Scaled(accelerate.Accelerator):  # type: ignore[misc]  # accelerate is untyped here
        def __init__(self, *arguments: Any, **settings: Any) -> None:
            super().__init__(*arguments, **settings)
            self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
            # It unscales gradients, and computes under autocast.
            self.native_amp = True

    return Scaled


@twin(
    "parity",
    "fsdp2-fp16_mixed-w2-model_mlp",
    match=r"^step 2: the loss is [\d.]+; [\d.]+ in the reference",
    also=CLIPPING | GRADIENTS,
)
class SkipsAFiniteStep(BeginsTooLarge):
    """The first step is skipped although its gradients are finite."""

    def update(self) -> None:
        optimizer, step = self.optimizer, self.optimizer.step
        if self.scaler.state_dict()["_growth_tracker"] == 0:
            optimizer.step = lambda: None
        super().update()
        optimizer.step = step


@twin(
    "parity",
    "fsdp2-fp16_mixed-w2-model_mlp",
    match=r"^step 1: rank 0: the gradient norm is (nan|inf); [\d.]+ in the reference",
    also=CLIPPING
    | GRADIENTS
    | {"optimizer": r"^trainable parameter 'inlet\.weight' did not move in three steps, on any rank"},
)
class NeverFits(BeginsTooLarge):
    """The scale grows back before each step, so that every step overflows and is skipped."""

    def step(self, number: int) -> float:
        self.scaler.load_state_dict({**self.scaler.state_dict(), "scale": 2.0**24})
        return super().step(number)
