"""Registry of strategies: how state is split over the ranks, what must hold then, and each library's backend config."""

from pytest_distcompat.registry import Registry
from pytest_distcompat.strategies._base import Dtypes, OneRank, Strategy, WrapSpec

STRATEGIES: Registry[Strategy] = Registry(__name__, Strategy, "strategy")

__all__ = ["STRATEGIES", "Dtypes", "OneRank", "Strategy", "WrapSpec"]
