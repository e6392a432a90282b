"""The shelf of precisions: which dtype a model is loaded, kept, computed, reduced and optimized in."""

from pytest_distcompat.precisions._base import Precision
from pytest_distcompat.shelf import Shelf

PRECISIONS: Shelf[Precision] = Shelf(__name__, Precision, "precision")

__all__ = ["PRECISIONS", "Precision"]
