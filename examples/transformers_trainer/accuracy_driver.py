"""Driver for a subclass of transformers.Trainer: the built-in driver does the rest, by its callbacks."""

from __future__ import annotations

from typing import Any, ClassVar

from pytest_distcompat.drivers.trainer import TrainerDriver


class AccuracyDriver(TrainerDriver):
    """accuracy_trainer.AccuracyTrainer on the built-in tiny model."""

    name: ClassVar[str] = "accuracy_trainer"

    def make_trainer(self, **settings: Any) -> Any:
        from accuracy_trainer import AccuracyTrainer

        return AccuracyTrainer(**settings)
