"""Mixture of experts: a router sends each row to one of them, and an expert may get none on a rank."""

from __future__ import annotations

from pytest_distcompat.models._classifier import classifier

MOE = classifier("moe", "MixtureOfExperts", frozen_modules=("inlet",), order=9)
