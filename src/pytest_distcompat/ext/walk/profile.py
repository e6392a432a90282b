"""The profile ``walk``: ``pytest --distcompat-profile walk`` runs walks and nothing else.

A *walk* is a sequence of calls of a live trainer that is compared with one process. A *profile*
says which *cells* (strategy, precision, number of ranks) and checks of a suite run. A suite has a
*driver*, the class that builds and calls its trainer. The core finds ``PROFILE`` by an entry point.
"""

from __future__ import annotations

from pytest_distcompat.cell import Cell
from pytest_distcompat.ext.walk.check import WALK
from pytest_distcompat.profiles import AddedProfile, Selection


def _cells(selection: Selection) -> list[Cell]:
    """Return a cell for each strategy of the suite, such as ``fsdp2-fp32-w2-model_mlp``.

    A driver that declares no calls has none.
    """
    if selection.driver.live_calls is None:
        return []
    # A dict, because it keeps the order and has each strategy only once.
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
