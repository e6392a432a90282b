"""Tiny models that the built-in drivers train, and the architectures of transformers.

They are made from configs, without a download.
"""

from pytest_distcompat.ext.upstream.models._architectures import (
    PREFIX,
    architecture,
    architectures,
    of_tasks,
)
from pytest_distcompat.ext.upstream.models._blank import BLANK, BLANK_TASKS
from pytest_distcompat.ext.upstream.models._inputs import loss_to_targets
from pytest_distcompat.models import ModelFamily

__all__ = [
    "ARCHITECTURES",
    "BLANK",
    "BLANK_TASKS",
    "architecture",
    "architectures",
    "loss_to_targets",
    "of_tasks",
]

#: ``hf:MODEL_TYPE`` and ``hf:CLASS``.
ARCHITECTURES = ModelFamily(PREFIX.removesuffix(":"), architecture)
