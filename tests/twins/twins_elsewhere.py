"""Trainers that go on as something else under the strategy that a checkpoint, or its weights, are carried to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_distcompat.drivers.accelerate import AccelerateDriver

from .declare import twin
from .twins_dtypes import SOUND, Upcasts

if TYPE_CHECKING:
    from torch.nn import Module

LATE = r"^rank 0: loss 1 after the load under fsdp2 is [\d.]+; [\d.]+ in the run that never stopped "


@twin(
    "portable",
    "ddp-fp32-w2-model_mlp",
    match=LATE + r"\(4e-05 allowed\)",
    sound=SOUND,
)
# Flat parameters have no names to be compared by: in lower precision too only the losses show it.
@twin(
    "portable",
    "fsdp1-bf16_upcast-w2-no_use_orig_params",
    match=LATE + r"\(2e-03 allowed\)",
    sound=SOUND,
)
class OtherDataElsewhere(Upcasts):
    """Everything comes back but the place in the data."""

    def step(self, number: int) -> float:
        return super().step(number + 1 if self.cell.strategy == "fsdp2" else number)


@twin(
    "portable",
    "ddp-bf16_upcast-w2-model_mlp",
    match=r"^rank 0: the loss of step 1 after the load under fsdp2 is nan; expected a finite number\nrank 1: the loss",
    sound=SOUND,
)
class MeanOfNothing(Upcasts):
    """Reports a mean over the tokens that it counted, of which there are none after the load."""

    def step(self, number: int) -> float:
        loss = super().step(number)
        return loss if self.cell.strategy == "ddp" else float("nan")


@twin(
    "portable",
    "zero3-fp32-w2-model_mlp",
    match=r"^parameter 'outlet\.[a-z.]+': the parts of all ranks are \d+ elements; expected \d+ after the export and build",
)
class PadsElsewhere(AccelerateDriver):
    """The other strategy gives the last layer a row more, that it can be cut evenly."""

    def build(self, model: Module) -> None:
        import torch

        if self.cell.strategy == "fsdp2":
            last = model.get_submodule("outlet")
            for name, parameter in list(last.named_parameters()):
                padded = torch.cat([parameter.detach(), torch.zeros_like(parameter[:1])])
                setattr(last, name, torch.nn.Parameter(padded))
        super().build(model)
