"""Trainers that do not do what a setting says, where the reference follows it."""

from __future__ import annotations

from typing import Any

from pytest_distcompat.drivers.accelerate import AccelerateDriver
from pytest_distcompat.drivers.deepspeed import DeepSpeedDriver
from pytest_distcompat.drivers.trainer import TrainerDriver

from .declare import CLIPPING, GRADIENTS, twin


@twin(
    "parity",
    "zero2-fp32-w2-model_mlp-set_ds_config.gradient_allreduce_op=sum",
    match=r"^step 1: rank 0: the gradient norm is 1\.02\d+; 2\.05\d+ in the reference",
    also=CLIPPING,
)
class AveragesAnyway(DeepSpeedDriver):
    """Gradients are averaged where the JSON asks for their sum."""

    def _arguments(self, config: dict[str, Any]) -> dict[str, Any]:
        config.pop("gradient_allreduce_op")
        return super()._arguments(config)


@twin(
    "parity",
    "zero2-fp32-w2-set_TrainingArguments.neftune_noise_alpha=1.0",
    match=r"^TrainingArguments\.neftune_noise_alpha=1\.0 has no effect: the training equals the reference",
)
class ForgetsTheNoise(TrainerDriver):
    """A setting without a reference is lost on the way."""

    def arguments(self, plan: Any) -> dict[str, Any]:
        arguments = super().arguments(plan)
        del arguments["neftune_noise_alpha"]
        return arguments


@twin(
    "parity",
    "ddp-fp32-w2-model_mlp-set_Accelerator.step_scheduler_with_optimizer=false",
    match=r"^step 1: rank 0: the learning rate is 0\.00285; 0\.003 in the reference",
    also={**CLIPPING, **GRADIENTS},
)
class StepsWithTheOptimizer(AccelerateDriver):
    """The scheduler takes a step for each rank where it should take one."""

    def _make_accelerator(self) -> Any:
        accelerator = super()._make_accelerator()
        accelerator.step_scheduler_with_optimizer = True
        return accelerator
