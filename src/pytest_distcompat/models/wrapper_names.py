"""Modules with the names of wrappers, which trainers take out of names."""

from __future__ import annotations

from pytest_distcompat.models._classifier import classifier

WRAPPER_NAMES = classifier("wrapper_names", "WrapperNames", frozen_modules=("inlet",), order=7)
