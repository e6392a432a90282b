"""The cells that a profile of the built-in suite has for the driver of a sighting."""

from __future__ import annotations

from pytest_distcompat import profiles, suite
from pytest_distcompat.cell import Cell
from pytest_distcompat.drivers import find_driver
from pytest_distcompat.precisions import PRECISIONS
from pytest_distcompat.strategies import STRATEGIES

MATRICES = {
    one.driver: one.matrix for one in (suite.TestTorch, suite.TestAccelerate, suite.TestTrainer, suite.TestDeepSpeed)
}


def cells(profile: str, driver: str, device: str = "cpu") -> list[Cell]:
    """Of the suite with that driver, or with the one that it derives from; also those that cannot be run there."""
    kind = find_driver(driver)
    names = (STRATEGIES.names(), PRECISIONS.names())
    return profiles.cells(profile, MATRICES[kind.name], driver=kind, names=names, world_size=2, device=device)
