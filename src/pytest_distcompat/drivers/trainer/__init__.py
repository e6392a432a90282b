"""The driver of transformers.Trainer: the names of ``ext.upstream.drivers.trainer`` that users import."""

from pytest_distcompat.ext.upstream.drivers.trainer import TrainerCalls, TrainerDriver

__all__ = ["TrainerCalls", "TrainerDriver"]
