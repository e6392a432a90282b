"""MLP as nn.Module: odd sizes (uneven shards), a persistent and a non-persistent buffer, a frozen layer."""

from __future__ import annotations

from pytest_distcompat.models._classifier import classifier

MLP_MODEL = classifier("mlp", "MLP", frozen_modules=("inlet",), ignored_module="frozen", order=2)
