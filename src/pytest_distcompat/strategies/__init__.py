"""The shelf of strategies: how state is split over the ranks, what is then true, how each library says it."""

from pytest_distcompat.shelf import Shelf
from pytest_distcompat.strategies._base import Dtypes, Strategy

STRATEGIES: Shelf[Strategy] = Shelf(__name__, Strategy, "strategy")

__all__ = ["STRATEGIES", "Dtypes", "Strategy"]
