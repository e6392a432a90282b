"""Trainers whose loss scale begins as torch's does, too large, which is sound; and a scaler that skips what it must not."""

from __future__ import annotations

from typing import Any

from .declare import CLIPPING, GRADIENTS, Torch, twin


class BeginsTooLarge(Torch):
    """No twin: at this scale the first steps overflow in float16, and are skipped until the scale fits."""

    def _scaler(self, device: str) -> Any:
        import torch

        return torch.amp.GradScaler(device, init_scale=2.0**24)


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
