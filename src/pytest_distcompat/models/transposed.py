"""A parameter that is not contiguous, as a weight that was loaded transposed."""

from __future__ import annotations

from pytest_distcompat.models._classifier import classifier

TRANSPOSED = classifier("transposed", "Transposed", frozen_modules=("inlet",), order=6)
