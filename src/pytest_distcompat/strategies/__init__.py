"""Registry of strategies: how state is split over the ranks.

A strategy also says what must hold then, and has each library's backend config.
"""

from pytest_distcompat.registry import Registry
from pytest_distcompat.strategies._base import (
    MAX_NORM,
    OPTION_WRAPPERS,
    Dtypes,
    Strategy,
    WrapSpec,
)

STRATEGIES: Registry[Strategy] = Registry(__name__, Strategy, "strategy")

__all__ = [
    "MAX_NORM",
    "OPTION_WRAPPERS",
    "STRATEGIES",
    "Dtypes",
    "Strategy",
    "WrapSpec",
]
