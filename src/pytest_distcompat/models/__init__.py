"""The registry of tiny models that the built-in drivers train: made from a config, nothing is downloaded."""

from pytest_distcompat.models._base import TinyModel
from pytest_distcompat.registry import Registry

MODELS: Registry[TinyModel] = Registry(__name__, TinyModel, "model")

__all__ = ["MODELS", "TinyModel"]
