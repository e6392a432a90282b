"""Trainers whose gradients are a mean over something else than they say."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pytest_distcompat.drivers.deepspeed import DeepSpeedDriver

from .declare import CLIPPING, GRADIENTS, PARITY, Torch, twin

if TYPE_CHECKING:
    import torch

    from pytest_distcompat.models import Batch


@twin(
    "mean",
    "ddp-fp32-w2",
    "fsdp2-fp32-w2-grad_accum_2",
    match=r"^gradients give each row or each micro-batch( or each rank)? the same weight; the driver says each token$",
)
class MeansOfMeans(Torch):
    """Says that each token counts alike, and averages the means of micro-batches and ranks.

    So does a reference that is derived from its loss: no other check finds it.
    """

    mean: ClassVar[str] = "token"


@twin(
    "mean",
    "ddp-fp32-w2",
    match=r"^step 1: gradients are a mean with other weights than those of .*: a token of rank \d's micro-batch 1 \(\d+ tokens\) has",
    also={**PARITY, **GRADIENTS, **CLIPPING},
)
class CountsThePromptToo(Torch):
    """Divides by all tokens of the rank plus those of its prompt: the count that a model without a prompt needs."""

    def micro_loss(self, batch: Batch) -> torch.Tensor:
        loss = super().micro_loss(batch)
        return loss * self.tiny.count(batch) / (batch["labels"].numel() + self.tiny.count(batch))


@twin(
    "mean",
    "zero2-bf16_upcast-w2",
    match=r"^gradients give each row or each micro-batch or each rank the same weight; the driver says each token$",
)
class MeansOfMeansInZero(DeepSpeedDriver):
    """The first twin, by DeepSpeed's engine."""

    mean: ClassVar[str] = "token"
