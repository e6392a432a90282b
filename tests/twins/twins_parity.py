"""Trainers that train another model than one process does: another loss, other gradients, another learning rate."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from pytest_distcompat.drivers.accelerate import AccelerateDriver
from pytest_distcompat.drivers.torch import TorchDriver
from pytest_distcompat.ext.upstream.drivers.tiny import DECAY
from pytest_distcompat.strategies._base import MAX_NORM

from .declare import CLIPPING, GRADIENTS, PARITY, Accelerate, Torch, twin
from .twins_dtypes import MastersInBfloat16

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from torch.nn import Module

    from pytest_distcompat.cell import Cell
    from pytest_distcompat.precisions import Precision

#: What the check says from the first step on, on every rank.
LOSS = r"^step 1: the loss is [\d.]+; [\d.]+ in the reference \([\d.e+-]+ off, 2.0e-05 allowed\).*\n"
NORM = r"^step 1: rank 0: the gradient norm is 2\.054\d+; 1\.027\d+ in the reference \(1\.0e\+00 off"
RATE = r"^step 1: rank 0: the learning rate is 0\.0027075; 0\.00285 in the reference\nstep 1: rank 1: the learning rate"
LATER = r"^step \d+: the loss is [\d.]+; [\d.]+ in the reference \([\d.e-]+ off, 2.2e-03 allowed\)"


def summed(driver: Any) -> None:
    """From here on the driver adds up micro-batches' losses; not before, for the reference is right."""
    loss, many = driver.tiny.loss, driver.accumulate
    driver.tiny = dataclasses.replace(driver.tiny, loss=lambda model, batch: many * loss(model, batch))


@twin(
    "parity",
    "ddp-fp32-w2-model_mlp-grad_accum_2",
    "fsdp1-fp32-w2-model_mlp-grad_accum_2",
    match=LOSS,
    also=CLIPPING | GRADIENTS,
)
class SumsMicroBatches(Torch):
    """The loss of a step is the sum over its micro-batches: the learning rate depends on how a batch is cut."""

    def build(self, model: Module) -> None:
        super().build(model)
        summed(self)


@twin("parity", "zero2-fp32-w2-model_mlp-grad_accum_2", match=LOSS, also=CLIPPING | GRADIENTS)
class SumsMicroBatchesZero(AccelerateDriver):
    """The twin above with ZeRO's flat masters."""

    def build(self, model: Module) -> None:
        super().build(model)
        summed(self)


@twin("parity", "fsdp2-fp32-w2-model_mlp-grad_accum_2", match=RATE, also=CLIPPING | GRADIENTS)
class SchedulePerMicroBatch(Torch):
    """The learning rate decays with every micro-batch."""

    def update(self) -> None:
        super().update()
        for _ in range(self.accumulate - 1):
            self.scheduler.step()


@twin("parity", "ddp-fp32-w2-model_mlp", "zero3-fp32-w2-model_mlp", match=RATE, also=CLIPPING | GRADIENTS)
class SchedulePerRank(AccelerateDriver):
    """A schedule in optimizer steps, handed to accelerate, which takes a step of it for each rank."""

    def make_scheduler(self, optimizer: torch.optim.Optimizer, every: int = 1) -> Any:
        return super().make_scheduler(optimizer)


DECAYS = r"^step 1: all ranks: weight_decay of (\S+ )+is 0\.01; 0 in the reference$"


@twin("parity", "fsdp1-bf16_upcast-w2-param_groups", match=DECAYS)
@twin("parity", "fsdp2-fp32-w2-param_groups", match=DECAYS)
@twin("parity", "zero1-bf16_upcast-w2-param_groups", match=DECAYS)
@twin("parity", "zero3-bf16_upcast-w2-param_groups", match=DECAYS)
class DecaysNorms(Accelerate):
    """All parameters are in groups that decay: a loss in 16 bits never shows it, one in float32 after a dozen steps."""

    def build(self, model: Module) -> None:
        super().build(model)
        for group in self.optimizer.param_groups:
            group["weight_decay"] = DECAY


# The case that the check grew from: over 20 steps the loss shows the optimizer's precision.
OWN_MASTERS = {"dtypes": r"AdamW updates bfloat16 masters; expected float32"}
twin("parity", "fsdp2-bf16_upcast-w2-model_mlp", match=LATER, also=OWN_MASTERS, sound="accelerate")(TorchDriver)
twin("parity", "zero2-bf16_upcast-w2-model_mlp", match=LATER, also=OWN_MASTERS)(MastersInBfloat16)


@twin(
    "parity",
    "ddp-fp32-w2-model_mlp",
    "fsdp1-fp32-w2-model_mlp",
    "fsdp2-fp32-w2-model_mlp",
    match=NORM,
    also=CLIPPING,
)
class SumsRanks(Torch):
    """Gradients are added up over the ranks: AdamW hides it, and clipping bites twice as often."""

    def update(self) -> None:
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(self.world.size)
        super().update()


@twin("parity", "zero1-fp32-w2-model_mlp", match=NORM, also=CLIPPING)
class SumsRanksZero(AccelerateDriver):
    """The twin above with ZeRO's flat masters."""

    def build(self, model: Module) -> None:
        super().build(model)
        backward = self.accelerator.backward
        self.accelerator.backward = lambda loss: backward(loss * self.world.size)


@twin(
    "parity",
    "fsdp2-fp32-w2-model_mlp",
    match=r"^step 1: rank 0: the gradient norm is 0\.\d+; 1\.027\d+ in(?s:.*)\nstep 1: rank 1: the gradient norm is 0\.",
)
# Where least is demanded of a norm.
@twin("parity", "fsdp2-fp8-w2", match=r"^step 1: rank 0: the gradient norm is .* \([\d.e-]+ off, 1\.5e-01 allowed\)\n")
class NormOfTheShard(Torch):
    """Clips by the norm of all and reports that of its own shard."""

    def _clip(self) -> float:
        from torch.nn.utils import get_total_norm

        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        # Before clipping.
        local = float(get_total_norm([gradient.to_local() for gradient in gradients]))
        super()._clip()
        return local


NOT_ONE = r"^step 1: .*the gradients that the optimizer gets have norm {}\d*; 0\.99999\d in the reference"


@twin(
    "clipping",
    "ddp-fp32-w2-model_mlp",
    "fsdp2-fp32-w2-model_mlp",
    match=NOT_ONE.format(r"1\.027"),
    also=PARITY | GRADIENTS,
)
class NeverClips(Torch):
    """The norm is measured and nothing follows from it."""

    def _clip(self) -> float:
        from torch.nn.utils import get_total_norm

        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        norm: Any = get_total_norm(gradients)
        return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


@twin("clipping", "ddp-fp32-w2-model_mlp", match=NOT_ONE.format(r"1\.027"), also=PARITY | GRADIENTS)
class ClipsTheSmall(NeverClips):
    """``max`` where ``min`` belongs: large gradients stay, small ones grow."""

    def _clip(self) -> float:
        norm = super()._clip()
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(max(1.0, MAX_NORM / norm))
        return norm


@twin("clipping", "fsdp1-fp32-w2-model_mlp", match=NOT_ONE.format(r"1\.027"), also=PARITY | GRADIENTS)
class ClipsByTheShard(Torch):
    """``torch.nn.utils.clip_grad_norm_`` on FSDP1, which has its own: each rank clips by the norm of what it holds."""

    def _clip(self) -> float:
        from torch.nn.utils import clip_grad_norm_

        return float(clip_grad_norm_(self.model.parameters(), MAX_NORM))


@twin("clipping", "fsdp2-fp32-w2-model_mlp", match=NOT_ONE.format(r"0\.973"), also=PARITY | GRADIENTS)
class ClipsTwice(Torch):
    """The factor is applied twice: by the trainer, and by a callback that does not know of it."""

    def _clip(self) -> float:
        norm = super()._clip()
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(min(1.0, MAX_NORM / norm))
        return norm


class Clips(Accelerate):
    """The DeepSpeed config clips to another norm than asked for."""

    to = 0.0

    def settings(self, precision: Precision, cell: Cell) -> Mapping[str, Any]:
        settings = super().settings(precision, cell)
        settings["deepspeed_plugin"].deepspeed_config["gradient_clipping"] = self.to
        return settings


@twin("clipping", "zero2-fp32-w2-model_mlp", match=NOT_ONE.format(r"1\.027"), also=PARITY | GRADIENTS)
class NeverClipsZero(Clips):
    """``gradient_clipping`` is missing from the config, and accelerate leaves clipping to the engine."""


@twin("clipping", "zero3-fp32-w2-model_mlp", match=NOT_ONE.format(r"0\.5"), also=PARITY | GRADIENTS)
class ClipsToHalf(Clips):
    """The config and the training loop disagree."""

    to = 0.5


@twin(
    "parity",
    "fsdp2-fp32-w2-model_mlp",
    match=r"^step 1: rank 0: the loss of this step is inf; expected a finite number\nstep 1: rank 1: the loss of this step",
)
class LossAndReferenceOverflow(Torch):
    """The trainer and its reference agree that every loss is infinite."""

    def step(self, number: int) -> float:
        return super().step(number) * math.inf

    def reference(self, model: Module, number: int, ranks: int) -> float:
        return super().reference(model, number, ranks) * math.inf


@twin(
    "parity",
    "fsdp2-fp32-w2-model_mlp",
    match=r"^step 7: all ranks: weight_decay of blocks\.\*\.linear\.bias, [^\n]+ is 0; 0\.01 in the reference$",
    also=CLIPPING,
)
class DecayLostOnTheWay(Torch):
    """A callback rebuilds the groups' settings in the middle of the training; losses and norms show it many steps later, or never."""

    def step(self, number: int) -> float:
        if number == 6:
            for group in self.optimizer.param_groups:
                group["weight_decay"] = 0.0
        return super().step(number)
