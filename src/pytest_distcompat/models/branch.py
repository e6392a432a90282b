"""A layer that half of the ranks leave out in each step, as a model for several tasks does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_distcompat.models._classifier import batch_of, classifier

if TYPE_CHECKING:
    from pytest_distcompat.models._base import Batch


def _batch(step: int, rank: int) -> Batch:
    """Return rows that all need the branch, or of which none does."""
    batch = batch_of(step, rank)
    first = batch["features"][:, 0].abs()
    batch["features"][:, 0] = first if (step + rank) % 2 else -first
    return batch


BRANCH = classifier("branch", "Branch", batch=_batch, frozen_modules=("inlet",), unused=True, order=7)
