"""Trainers that do not start from the model that they are given."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_distcompat.drivers.accelerate import AccelerateDriver
from pytest_distcompat.drivers.deepspeed import DeepSpeedDriver

from .declare import CLIPPING, GRADIENTS, PARITY, Torch, twin

if TYPE_CHECKING:
    from torch.nn import Module

OTHER_TRAINING = {**PARITY, **GRADIENTS, **CLIPPING}


@twin(
    "start",
    "fsdp2-fp16_mixed-w2-model_mlp",
    match=r"^parameter 'blocks\.0\.linear\.bias' and \d+ others: other values after build than were loaded$",
)
class RoundsBeforeSharding(Torch):
    """Casts the model to the dtype that it computes in, and upcasts that: masters with half of the bits.

    The tolerances of the precision hide it from every check that compares with the reference.
    """

    def build(self, model: Module) -> None:
        super().build(model.half().float())


@twin(
    "start",
    "ddp-fp32-w2-model_mlp",
    "fsdp2-fp32-w2-model_mlp",
    match=r"^parameter 'blocks\.0\.linear\.bias' and \d+ others: other values after build than were loaded$",
    also=OTHER_TRAINING,
)
class MakesItAnew(Torch):
    """Makes the model from its configuration, and forgets to load the given weights."""

    def build(self, model: Module) -> None:
        import torch

        torch.manual_seed(7)
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                module.reset_parameters()
        super().build(model)


@twin(
    "start",
    "zero1-fp32-w2-model_mlp",
    "zero2-fp32-w2-model_mlp",
    match=r"^master 'blocks\.0\.linear\.bias' and \d+ others: other values after build than were loaded$",
)
class DecaysMasters(DeepSpeedDriver):
    """Makes the optimizer's state by a step without gradients, in which weight decay is little but not nothing.

    As DeepSpeed does it at stage 0: docs/upstream/deepspeed_stage0_first_step.py.
    """

    def build(self, model: Module) -> None:
        super().build(model)
        for partition in self.optimizer.single_partition_of_fp32_groups:
            partition.data.mul_(1 - 1e-6)


@twin(
    "start",
    "ddp-fp32-w2-model_mlp",
    "zero2-bf16_upcast-w2-model_mlp",
    match=r"^rank 0: the whole model is in evaluation mode in step 1; in training mode when loaded\nrank 1: ",
)
class EvaluatesBeforeTraining(AccelerateDriver):
    """Looks at the loss before the first step, and forgets to go back to training mode."""

    def build(self, model: Module) -> None:
        super().build(model)
        self.model.eval()
