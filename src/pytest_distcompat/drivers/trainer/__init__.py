"""The driver of transformers.Trainer, under the names that users import.

``ext.upstream.drivers.trainer`` has them.
"""

from pytest_distcompat.ext.upstream.drivers.trainer import TrainerCalls, TrainerDriver

__all__ = ["TrainerCalls", "TrainerDriver"]
