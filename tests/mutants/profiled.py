"""The cells that a profile of the built-in suite has for the driver of a sighting."""

from __future__ import annotations

from pytest_distcompat import profiles, suite
from pytest_distcompat.cell import Cell
from pytest_distcompat.checks import CHECKS
from pytest_distcompat.drivers import find_driver
from pytest_distcompat.drivers._declared import unsupported_reason
from pytest_distcompat.engine import not_applicable
from pytest_distcompat.precisions import PRECISIONS
from pytest_distcompat.strategies import STRATEGIES

MATRICES = {
    suite_class.driver: suite_class.matrix
    for suite_class in (suite.TestTorch, suite.TestAccelerate, suite.TestTrainer, suite.TestDeepSpeed)
}


def cells(profile: str, driver: str, device: str = "cpu") -> list[Cell]:
    """Of the suite with that driver, or with the one that it derives from; also those that cannot be run there."""
    kind = find_driver(driver)
    names = (STRATEGIES.names(), PRECISIONS.names())
    return profiles.cells(profile, MATRICES[kind.name], driver=kind, names=names, world_size=2, device=device)


def left_out(profile: str, driver: str) -> set[tuple[Cell, str]]:
    """The checks that the profile leaves out in these cells."""
    kind = find_driver(driver)
    checks = {
        cell: [name for name, check in CHECKS.by_name.items() if not not_applicable(check, cell, kind, {})]
        for cell in cells(profile, driver)
        if not unsupported_reason(kind, cell, "cpu")
    }
    return {*profiles.left_out(profile, checks)}
