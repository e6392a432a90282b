"""Trainers that train once as they should, and otherwise in the second training of one object."""

from __future__ import annotations

from typing import Any

from pytest_distcompat.drivers.trainer import TrainerDriver

from .declare import twin


@twin(
    "again",
    "fsdp2-fp32-w2-model_mlp",
    match=r"^step 1 of the second training: rank 0: the learning rate is 0\.0023\d+; 0\.0028\d+ in the reference\n"
    r"step 1 of the second training: rank 1: ",
)
class GoesOnWithTheSchedule(TrainerDriver):
    """The second training has the spent schedule of the first one."""

    def again(self) -> None:
        self.trainer._created_lr_scheduler = False


@twin(
    "again",
    "ddp-fp32-w2-model_mlp",
    match=r"^step 2 of the second training: the loss is [\d.]+; [\d.]+ in the reference \(.* off, 2\.0e-05 allowed\)",
)
class ForgetsItsMoments(TrainerDriver):
    """The second training has a new optimizer, where one process keeps the old one."""

    def again(self) -> None:
        self.trainer.optimizer = None


@twin(
    "again",
    "ddp-fp32-w2-model_mlp",
    match=r"^exp_avg '[\w.]+' and \d+ others: other values after the load in the trainer that saved",
)
class LoadsIntoANewOptimizerAlone(TrainerDriver):
    """A load leaves an optimizer that has stepped before as it is."""

    def make_trainer(self, **settings: Any) -> Any:
        from transformers import Trainer

        class KeepsOptimizer(Trainer):  # type: ignore[misc]  # transformers is untyped here
            """Trainer that loads the optimizer's state only where there is none."""

            def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
                if not self.optimizer.state:
                    super()._load_optimizer_and_scheduler(checkpoint)

        return KeepsOptimizer(**settings)
