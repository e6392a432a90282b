"""Dropout in each block: every forward draws random numbers."""

from __future__ import annotations

from pytest_distcompat.models._classifier import classifier

DROPOUT = classifier("dropout", "Dropout", frozen_modules=("inlet",), random=True, order=7)
