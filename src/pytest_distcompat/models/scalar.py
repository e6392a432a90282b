"""A parameter of no dimension, as a learned temperature is."""

from __future__ import annotations

from pytest_distcompat.models._classifier import classifier

SCALAR = classifier("scalar", "Scalar", frozen_modules=("inlet",), order=5)
