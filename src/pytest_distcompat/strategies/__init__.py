"""The registry of strategies: how state is split over the ranks, what is then true, how each library says it."""

from pytest_distcompat.registry import Registry
from pytest_distcompat.strategies._base import Dtypes, Strategy

STRATEGIES: Registry[Strategy] = Registry(__name__, Strategy, "strategy")

__all__ = ["STRATEGIES", "Dtypes", "Strategy"]
