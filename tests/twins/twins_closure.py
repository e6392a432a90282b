"""Trainers that compute a step's gradients inside of ``optimizer.step(closure)``, as Lightning's does."""

from __future__ import annotations

from .declare import GRADIENTS, PARITY, Torch, twin

SOUND = "twins.twins_closure:ByClosure"


class ByClosure(Torch):
    """Gradients are computed and clipped in the closure."""

    def step(self, number: int) -> float:
        import torch

        total = 0.0

        def closure() -> float:
            nonlocal total
            self.optimizer.zero_grad()
            total = 0.0
            for batch, last in self.batches(number):
                with self._synchronised(last), self._autocast():
                    loss = self.tiny.loss(self.model, batch) / self.accumulate
                    torch.autograd.backward(loss)
                total += float(loss.detach())
            self.clip()
            return total

        self.optimizer.step(closure)
        self.scheduler.step()
        return total

    def clip(self) -> None:
        """After the gradients are there, before the optimizer takes them."""
        self.grad_norm = self._clip()


@twin(
    "clipping",
    "ddp-fp32-w2-model_mlp",
    "fsdp2-fp32-w2-model_mlp",
    match=r"^step 1: .*the gradients that the optimizer gets have norm 1\.02\d+; 0\.999999 in the reference",
    also=PARITY | GRADIENTS,
    sound=SOUND,
)
class ClippedBefore(ByClosure):
    """Clips before the closure computes gradients: it clips those of the last step."""

    def step(self, number: int) -> float:
        self._clip()
        return super().step(number)

    def clip(self) -> None:
        """Too early by then."""
