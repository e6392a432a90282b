"""The profile ``walk``."""

from __future__ import annotations

from collections.abc import Iterable

from pytest_distcompat.cell import Cell
from pytest_distcompat.driver import Driver
from pytest_distcompat.ext.walk.check import WALK
from pytest_distcompat.profiles import AddedProfile


def _cells(driver: type[Driver], strategies: Iterable[str], world_size: int) -> list[Cell]:
    """Return a cell for each strategy; none of a driver that declares no calls."""
    if driver.live_calls is None:
        return []
    return [Cell.of(strategy, "fp32", world_size, model="mlp") for strategy in strategies]


PROFILE = AddedProfile(
    "walk",
    "each strategy of the matrix in fp32, model `mlp`: calls of a live trainer in drawn order, against one process",
    check=WALK,
    cells=_cells,
)
