"""Trainers that feed the wrong data: to a rank, after a load, or of a step with several micro-batches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pytest_distcompat.drivers.accelerate import AccelerateDriver

from .declare import CLIPPING, GRADIENTS, PARITY, Torch, twin
from .twins_active import LowerStage

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch.nn import Module

    from pytest_distcompat.models import Batch

TWO_LIKE = r"^ranks 0 and 1 are fed the same batch in step 1\n(?s:.*)in step 5$"
OTHER = (
    r"^rank 0: step 1 after the load is fed other data than in the run that never stopped(?s:.*)\nrank 1: step 2 after"
)
RANDOM = r"^rank 0: torch's random state after the load is another than at the save\nrank 1: [^\n]+$"


@twin(
    "data", "ddp-fp32-w2-model_mlp", "fsdp2-fp32-w2-model_mlp", match=TWO_LIKE, also={**PARITY, **CLIPPING, **GRADIENTS}
)
class SameData(Torch):
    """No distributed sampler: every rank learns from the batches of rank 0."""

    def batch_of(self, place: int, rank: int) -> Batch:
        return super().batch_of(place, 0)


@twin(
    "data", "zero3-fp32-w2-model_mlp", "ddp-fp32-w2-model_mlp", match=TWO_LIKE, also={**PARITY, **CLIPPING, **GRADIENTS}
)
class SameDataAccelerate(AccelerateDriver):
    """The twin above where the loader distributes what each rank would have loaded by itself."""

    def dataset(self, ranks: int) -> list[dict[str, torch.Tensor]]:
        rows = super().dataset(ranks)
        size = len(rows) // (self.epoch * ranks)
        batches = [rows[n : n + size] for n in range(0, len(rows), size)]
        return [row for n in range(len(batches)) for row in batches[n - n % ranks]]


@twin(
    "data",
    "fsdp2-fp32-w2-model_mlp",
    match=OTHER,
    also={"resume": r"loss 1 after the load is"},
)
class EpochBeginsAnew(Torch):
    """The place in the data is nowhere saved."""

    loaded = 0

    def load(self, directory: Path) -> None:
        super().load(directory)
        self.loaded = 3

    def micros(self, number: int) -> range:
        return super().micros(number - self.loaded)


@twin(
    "data",
    "zero1-fp32-w2-model_mlp",
    "ddp-fp32-w2-model_mlp",
    match=OTHER,
    also={"resume": r"loss 1 after the load is"},
)
class EpochBeginsAnewAccelerate(AccelerateDriver):
    """``skip_first_batches`` is forgotten."""

    def _batches(self, done: int) -> Iterator[Batch]:
        return super()._batches(0)


@twin("data", "ddp-fp32-w2-model_mlp", "fsdp1-fp32-w2-model_mlp", match=RANDOM)
class SeededAnew(Torch):
    """Dropout and shuffling after a load are those of the beginning."""

    def load(self, directory: Path) -> None:
        import torch

        super().load(directory)
        torch.manual_seed(0)


@twin("data", "zero2-fp32-w2-model_mlp", match=RANDOM)
class SeededAnewZero(AccelerateDriver):
    """The twin above with ZeRO's flat masters."""

    def load(self, directory: Path) -> None:
        import torch

        super().load(directory)
        torch.manual_seed(0)


@twin(
    "randomness",
    "ddp-fp32-w2-model_dropout",
    match=r"^rank 0: a step draws no random numbers; [^\n]+\nrank 1: the whole model is in training mode in step 3; in evaluation",
    also={
        "resume": r"^rank 0: the whole model is in training mode in step 1 after the load; in evaluation mode in the run"
    },
)
class FirstRankEvaluates(Torch):
    """Rank 0 alone evaluates after the second step, and goes on in evaluation mode."""

    def step(self, number: int) -> float:
        loss = super().step(number)
        if number == 1 and not self.world.rank:
            self.model.eval()
        return loss


@twin(
    "accumulation",
    "ddp-fp32-w2-model_mlp-grad_accum_2",
    "fsdp1-fp32-w2-model_mlp-grad_accum_2",
    "fsdp2-fp32-w2-model_mlp-grad_accum_2",
    match=r"^step 1: rank 0: (1180|1612|1288) elements of gradients were reduced; expected (590|806|644) with one micro-batch",
)
class ReducesEach(Torch):
    """No ``no_sync``: the same numbers, for twice the traffic."""

    def _synchronised(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()


@twin(
    "accumulation",
    "zero1-fp32-w2-model_mlp-grad_accum_2",
    match=r"^step 1: rank 0: 1181 elements of gradients were reduced; expected 591 with one micro-batch",
    also={"active": r"ZeRO stage 2 is running; expected 1"},
)
class HigherStage(LowerStage):
    """ZeRO-2 under the name of ZeRO-1: less memory, and a reduction for each micro-batch."""

    stage = 2


@twin(
    "accumulation",
    "zero2-fp32-w2-model_mlp-grad_accum_2",
    match=r"^step 1: rank 0: 591 elements of gradients were reduced; expected 2 times 591, once a micro-batch",
    also={"active": r"ZeRO stage 1 is running; expected 2"},
)
class KeepsWholeGradients(LowerStage):
    """ZeRO-1 under the name of ZeRO-2."""


@twin(
    "accumulation",
    "ddp-fp32-w2-model_mlp-grad_accum_2",
    "zero2-fp32-w2-model_mlp-grad_accum_2",
    match=r"^step 1: rank 0: the optimizer stepped 2 times; 1 with one micro-batch",
    also={**PARITY, **CLIPPING, **GRADIENTS},
)
class StepsEach(AccelerateDriver):
    """The loop gets the number of micro-batches, the trainer does not."""

    def build(self, model: Module) -> None:
        super().build(model)
        self.accelerator.gradient_accumulation_steps = 1


@twin(
    "accumulation",
    "fsdp2-fp32-w2-model_mlp-grad_accum_2",
    match=r"^step 1: rank 0: fed 1 micro-batches; expected 2",
    also={**PARITY, **CLIPPING, **GRADIENTS},
)
class OneOfTwo(Torch):
    """All micro-batches of a step but the last are thrown away."""

    def batches(self, number: int) -> Iterator[tuple[Batch, bool]]:
        return ((batch, last) for batch, last in super().batches(number) if last)


@twin(
    "accumulation",
    "ddp-fp32-w2-model_mlp-grad_accum_2",
    match=r"^step 1: rank 0: 1 of 2 micro-batches are one that was fed before in the same step",
    also={**PARITY, **CLIPPING, **GRADIENTS},
)
class OneTwice(Torch):
    """The iterator over the data is made anew for each micro-batch."""

    def batches(self, number: int) -> Iterator[tuple[Batch, bool]]:
        first = self.batch_of(self.micros(number)[0], self.world.rank)
        return ((first, last) for _, last in super().batches(number))


@twin(
    "accumulation",
    "ddp-fp32-w2-model_mlp-grad_accum_2",
    match=r"^step 8: rank 0: 0 elements of gradients were reduced; expected 590 with one micro-batch",
    also={"active": r"^rank 1: 12 parameters differ from rank 0's after 20 steps", **PARITY, **CLIPPING},
)
class EndOfEpochForgotten(Torch):
    """At the end of an epoch a step has fewer micro-batches, and no last one."""

    def batches(self, number: int) -> Iterator[tuple[Batch, bool]]:
        batches_of_step = list(super().batches(number))
        return ((batch, last and len(batches_of_step) == self.accumulate) for batch, last in batches_of_step)
