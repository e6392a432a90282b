"""Registry of the tiny models that the built-in drivers train; they are made from a config, without a download."""

from pytest_distcompat.models._base import TinyModel
from pytest_distcompat.registry import Registry

MODELS: Registry[TinyModel] = Registry(__name__, TinyModel, "model")

__all__ = ["MODELS", "TinyModel"]
