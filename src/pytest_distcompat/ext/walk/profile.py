"""The profile ``walk``."""

from __future__ import annotations

from pytest_distcompat.cell import Cell
from pytest_distcompat.ext.walk.check import WALK
from pytest_distcompat.profiles import AddedProfile, Selection


def _cells(selection: Selection) -> list[Cell]:
    """Return a cell for each strategy that the suite claims.

    A driver that declares no calls has none.
    """
    if selection.driver.live_calls is None:
        return []
    strategies = dict.fromkeys(strategy for strategy, _precision in selection.claimed)
    cells: list[Cell] = []
    for strategy in strategies:
        cells.append(Cell.of(strategy, "fp32", selection.world_size, model="mlp"))
    return cells


PROFILE = AddedProfile(
    "walk",
    "each strategy of the matrix in fp32, model `mlp`: "
    "calls of a live trainer in drawn order, against one process",
    check=WALK,
    cells=_cells,
)
