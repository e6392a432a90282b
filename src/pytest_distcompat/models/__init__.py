"""Registry of the tiny models that the built-in drivers train; they are made from a config, without a download."""

from pytest_distcompat.cell import OPTIONS, Cell
from pytest_distcompat.installed import version_of
from pytest_distcompat.models._base import TinyModel
from pytest_distcompat.registry import Registry

MODELS: Registry[TinyModel] = Registry(__name__, TinyModel, "model")

#: The default model where transformers is not installed, which the others are made by.
WITHOUT_TRANSFORMERS = "mlp"

__all__ = ["MODELS", "WITHOUT_TRANSFORMERS", "TinyModel", "model_of"]


def model_of(cell: Cell) -> TinyModel:
    """Return the model of a cell; for the default one ``mlp`` where transformers is not installed."""
    name = str(cell.option("model"))
    missing = name == OPTIONS["model"].default and version_of("transformers") is None
    return MODELS.get(WITHOUT_TRANSFORMERS if missing else name)
