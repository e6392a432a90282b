"""Parameters and buffers as no library's own model has them: empty, smaller than the ranks, of many dtypes."""

from __future__ import annotations

from pytest_distcompat.models._classifier import classifier

ODD = classifier("odd", "Odd", frozen_modules=("inlet",), order=4)
