"""Registry of the tiny models that the built-in drivers train; they are made from a config, without a download."""

import functools

from pytest_distcompat.cell import OPTIONS, Cell
from pytest_distcompat.installed import version_of
from pytest_distcompat.models._architectures import PREFIX, architecture, architectures
from pytest_distcompat.models._base import TinyModel
from pytest_distcompat.registry import Registry

MODELS: Registry[TinyModel] = Registry(__name__, TinyModel, "model")

#: The default model where transformers is not installed, which the others are made by.
WITHOUT_TRANSFORMERS = "mlp"

__all__ = ["MODELS", "WITHOUT_TRANSFORMERS", "TinyModel", "architecture", "architectures", "default_model", "model_of"]


def model_of(cell: Cell) -> TinyModel:
    """Return the model of a cell; for the default one ``mlp`` where transformers is not installed."""
    name = str(cell.option("model"))
    if name.startswith(PREFIX):
        return architecture(name)
    return MODELS.get(default_model() if name == OPTIONS["model"].default else name)


@functools.cache
def default_model() -> str:
    """Return the name of the default model. Cached: it is asked for each cell, and reading metadata takes 1 ms."""
    return str(OPTIONS["model"].default) if version_of("transformers") else WITHOUT_TRANSFORMERS
