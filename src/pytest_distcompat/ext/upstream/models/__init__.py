"""Tiny models that the built-in drivers train, and the architectures of transformers.

They are made from configs, without a download. The core looks them up by the name in option
``model`` of a cell: ``llama`` and others by entry points that name ``llama.py`` and
``classifiers.py``; ``hf:gpt2`` by the entry point that names ``ARCHITECTURES``.
"""

from pytest_distcompat.ext.upstream.models._architectures import architecture
from pytest_distcompat.ext.upstream.models._inputs import loss_to_targets
from pytest_distcompat.ext.upstream.models._tables import PREFIX, architectures, of_tasks
from pytest_distcompat.ext.upstream.models._unsupported import UNSUPPORTED, UNSUPPORTED_TASKS
from pytest_distcompat.models import ModelFamily

__all__ = [
    "ARCHITECTURES",
    "UNSUPPORTED",
    "UNSUPPORTED_TASKS",
    "architecture",
    "architectures",
    "loss_to_targets",
    "of_tasks",
]

#: ``hf:MODEL_TYPE`` and ``hf:CLASS``.
ARCHITECTURES = ModelFamily(PREFIX.removesuffix(":"), architecture)
