"""Registry of precisions: the dtypes that a model is loaded, computed and optimized in."""

from pytest_distcompat.precisions._base import Precision, installed
from pytest_distcompat.registry import Registry

PRECISIONS: Registry[Precision] = Registry(__name__, Precision, "precision")

__all__ = ["PRECISIONS", "Precision", "installed"]
