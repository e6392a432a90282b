"""BatchNorm, whose buffers each rank fills from its own data."""

from __future__ import annotations

from pytest_distcompat.models._classifier import classifier

BATCHNORM = classifier("batchnorm", "BatchNorm", frozen_modules=("inlet",), only_float32=True, order=9)
