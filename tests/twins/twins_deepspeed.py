"""Trainers that use DeepSpeed's own API wrongly: the JSON, the boundary of accumulation, what is loaded."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from pytest_distcompat.drivers.deepspeed import DeepSpeedDriver
from pytest_distcompat.precisions import PRECISIONS
from pytest_distcompat.strategies import STRATEGIES

from .declare import GRADIENTS, twin

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch.nn import Module

    from pytest_distcompat.cell import Cell
    from pytest_distcompat.precisions import Precision


class DeepSpeed(DeepSpeedDriver):
    """The DeepSpeed driver with its JSON as one more action, to be got wrong."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._sound = self.strategy.deepspeed
        self.strategy = dataclasses.replace(self.strategy, deepspeed=self.settings)

    def settings(self, precision: Precision, cell: Cell) -> Mapping[str, Any]:
        """As the strategy writes it."""
        assert self._sound is not None
        return self._sound(precision, cell)


@twin(
    "active",
    "zero2-fp32-w2-model_mlp",
    match=r"rank 1: ZeRO stage 1 is running; expected 2",
)
class AnotherStage(DeepSpeed):
    """The JSON asks for another stage than the user did."""

    def settings(self, precision: Precision, cell: Cell) -> Mapping[str, Any]:
        other = STRATEGIES.get("zero1").deepspeed
        assert other is not None
        return other(precision, cell)


@twin(
    "dtypes",
    "zero1-bf16_upcast-w2-model_mlp",
    match=r"AdamW updates bfloat16 masters; expected float32(?s:.*)AdamW keeps state in bfloat16; expected float32",
    also={"parity": r"the loss is"},
)
class NativeMastersInBfloat16(DeepSpeed):
    """DeepSpeed's low-precision mode where float32 masters are promised."""

    def settings(self, precision: Precision, cell: Cell) -> Mapping[str, Any]:
        return super().settings(PRECISIONS.get("bf16_pure"), cell)


@twin(
    "clipping",
    "zero0-fp32-w2-model_mlp",
    "zero3-fp32-w2-model_mlp",
    match=r"^step 1: \S.*: the gradients that the optimizer gets have norm 1\.\d+; 0\.99\d* in the reference",
    also={"parity": r"step 3: the loss is"} | GRADIENTS,
)
class NativeNotClipped(DeepSpeed):
    """``gradient_clipping`` got lost."""

    def settings(self, precision: Precision, cell: Cell) -> Mapping[str, Any]:
        return {**super().settings(precision, cell), "gradient_clipping": 0.0}


@twin(
    "parity",
    "zero0-fp32-w2-model_mlp-grad_accum_4",
    "zero2-fp32-w2-model_mlp-grad_accum_4",
    match=r"^step 8: rank 0: the learning rate is",
    also={"clipping": r"^step [89]: "},
)
class NoBoundary(DeepSpeedDriver):
    """The engine counts micro-batches by itself: the short last step of an epoch leaks into the next one."""

    def step(self, number: int) -> float:
        total = 0.0
        for batch, _ in self.batches(number):
            loss = self.tiny.loss(self.model, batch)
            self.model.backward(loss)
            self.model.step()
            total += float(loss.detach()) / self.accumulate
        return total


@twin(
    "parity",
    "zero1-fp32-w2-model_mlp-grad_accum_2",
    match=r"^step 1: rank 0: the learning rate is 0\.0027\d*; 0\.00285 in the reference",
    also={"clipping": "the gradients that the optimizer gets have norm"} | GRADIENTS,
)
class SchedulerEachMicroBatch(DeepSpeedDriver):
    """The loop steps the scheduler, and so does the engine."""

    def step(self, number: int) -> float:
        loss = super().step(number)
        for _ in self.micros(number)[1:]:
            self.scheduler.step()
        return loss


@twin(
    "resume",
    "zero0-fp32-w2-model_mlp",
    "zero3-fp32-w2-model_mlp",
    match=r"rank 1: (optimizer state|the optimizer's state).*(?s:.*)loss 2 after the load",
)
class NativeOptimizerNotLoaded(DeepSpeedDriver):
    """Adam starts again from nothing."""

    def load(self, directory: Path) -> None:
        super().load(directory)
        self.model.load_checkpoint(str(directory), load_optimizer_states=False)
        for state in self.optimizer.state.values():
            for value in state.values():
                value.zero_()


@twin(
    "resume",
    "zero2-fp32-w2-model_mlp",
    match=r"rank 1: scheduler is at 'last_epoch=0 .*; saved at 'last_epoch=3 ",
)
class NativeSchedulerNotLoaded(DeepSpeedDriver):
    """The learning rate starts again."""

    def load(self, directory: Path) -> None:
        self.model.load_checkpoint(str(directory), load_lr_scheduler_states=False)


@twin(
    "reshard",
    "zero2-fp32-w2-model_mlp",
    "zero1-fp32-w4-tp_2",
    match=r"exp_avg",
)
class UniversalWithoutMoments(DeepSpeedDriver):
    """The universal checkpoint has everything; what is loaded of it has not."""

    def load(self, directory: Path) -> None:
        super().load(directory)
        for state in self.optimizer.state.values():
            state["exp_avg"].zero_()


@twin(
    "active",
    "zero3-fp32-w4-model_mlp-set_ds_config.zero_optimization.zero_hpz_partition_size=2",
    "zero3-bf16_upcast-w4-set_ds_config.zero_optimization.zero_hpz_partition_size=2",
    match=r"^rank 0: the secondary partition of weights is nowhere; expected one among 2",
)
class NoSecondaryPartition(DeepSpeed):
    """ZeRO++'s ``zero_hpz_partition_size`` got lost on its way into the JSON."""

    def settings(self, precision: Precision, cell: Cell) -> Mapping[str, Any]:
        return super().settings(precision, cell.without("set"))


@twin(
    "units",
    "zero2-fp32-w2-model_mlp-activation_checkpointing_deepspeed",
    match=r"^rank 0: the activations are recomputed of nothing; expected 'blocks\.0', 'blocks\.1'\n"
    r"(?s:.*)blocks computed nothing again in the backward pass",
)
class ConfiguresRecomputationAlone(DeepSpeedDriver):
    """The JSON has a section activation_checkpointing, which is for models that call ``deepspeed.checkpointing``: none does."""

    def _recompute(self, model: Module, config: Mapping[str, Any]) -> None:
        import deepspeed

        deepspeed.checkpointing.configure(None, deepspeed_config=dict(config))
