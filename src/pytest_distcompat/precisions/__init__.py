"""The registry of precisions: which dtype a model is loaded, kept, computed, reduced and optimized in."""

from pytest_distcompat.precisions._base import Precision
from pytest_distcompat.registry import Registry

PRECISIONS: Registry[Precision] = Registry(__name__, Precision, "precision")

__all__ = ["PRECISIONS", "Precision"]
