"""Whether the class of a suite is right.

A *suite* is a subclass of ``CompatSuite`` that an adopter writes::

    class TestMyTrainer(CompatSuite):
        driver = "my_trainer.testing:Driver"
        matrix = Matrix(strategies=("ddp", "fsdp2"))
        expect = (fails("names", strategy="fsdp2", reason="org/repo#1"),)

The *matrix* stands for *cells*, configurations such as ``ddp-fp32-w2``: strategy, precision, 2
ranks. An *expectation* in ``expect`` declares that a *check* (a claim such as ``names``) fails in
some cells. The hook ``pytest_pycollect_makeitem`` calls ``validate`` when the class is collected;
an UsageProblem becomes a collection error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from pytest_distcompat.cell import Cell, Matrix
from pytest_distcompat.checks import CHECKS
from pytest_distcompat.compat_suite import CompatSuite
from pytest_distcompat.drivers import DRIVERS, find_driver
from pytest_distcompat.expect import Expectation
from pytest_distcompat.failures import UsageProblem
from pytest_distcompat.plugin.suite.declared_names import check_names
from pytest_distcompat.precisions import PRECISIONS
from pytest_distcompat.strategies import STRATEGIES


def is_base(suite: type[CompatSuite]) -> bool:
    """Tell whether a class is only a base of suites: it has no driver, and it has subclasses.

    Nothing is collected from such a class. One without a driver and without subclasses is a
    mistake.
    """
    if suite is CompatSuite:
        return True
    return not suite.driver and bool(suite.__subclasses__())


def validate(suite: type[CompatSuite], world_size: int) -> None:
    """Check the class of a suite.

    Args:
        suite: The class.
        world_size: The number of ranks for a matrix that names none.

    Raises:
        UsageProblem: The class overrides a test, an attribute has another type than it should, a
            name does not exist, or an expectation covers no cell.
    """
    _check_overrides(suite)
    _check_kinds(suite)
    driver = find_driver(suite.driver)
    for expectation in suite.expect:
        if not isinstance(expectation, Expectation):
            raise UsageProblem(
                f"{suite.__name__}.expect holds {expectation!r}; "
                "expected fails(...) or refuses(...)"
            )
        check_names(expectation)
    cells = list(all_cells(suite, world_size))
    # Each ``get`` raises UsageProblem for a name that does not exist.
    for cell in cells:
        STRATEGIES.get(cell.strategy)
        PRECISIONS.get(cell.precision)
    for expectation in suite.expect:
        if not _covers_any(suite, expectation, cells):
            driver_name = driver.name or suite.driver
            raise UsageProblem(
                f"{suite.__name__}.expect: {expectation} "
                f"covers no cell of the matrix ({driver_name})"
            )


def _check_overrides(suite: type[CompatSuite]) -> None:
    """Check that the class, or a base of it, has the test functions of ``CompatSuite`` itself."""
    for name in vars(CompatSuite):
        if not name.startswith("test"):
            continue
        if getattr(suite, name, None) is not getattr(CompatSuite, name):
            raise UsageProblem(
                f"{suite.__name__} overrides {name!r}. A standard test is not overridden: "
                "say what does not hold with expect = (fails(...), refuses(...))"
            )


def _check_kinds(suite: type[CompatSuite]) -> None:
    """Check the types of the class's attributes, and that it has a driver."""
    for name, kind in (("driver", str), ("matrix", Matrix), ("expect", tuple)):
        value = getattr(suite, name)
        if not isinstance(value, kind):
            raise UsageProblem(f"{suite.__name__}.{name} is {value!r}; expected a {kind.__name__}")
    if not suite.driver:
        raise UsageProblem(
            f"{suite.__name__} has no driver (driver = {suite.driver!r}): "
            "expected module:attribute, or one of "
            f"{', '.join(DRIVERS.names())}"
        )


def _covers_any(suite: type[CompatSuite], expectation: Expectation, cells: Iterable[Cell]) -> bool:
    """Tell whether an expectation covers a check in any of these cells.

    Counts of ranks and machines are ignored if the suite's matrix does not set them. They come from
    options then, so the expectation may cover cells of another session.

    Args:
        suite: The suite.
        expectation: The expectation; its ``facets`` are the conditions on a cell, as
            ``(("strategy", "fsdp2"), ("world_size", 4))``.
        cells: The cells of the suite.
    """
    ignored = suite.matrix.counts_of_session()
    facets = []
    for name, wanted in expectation.facets:
        if name not in ignored:
            facets.append((name, wanted))
    applicable = dataclasses.replace(expectation, facets=tuple(facets))
    for cell in cells:
        if any(applicable.covers(cell, check) for check in CHECKS.names()):
            return True
    return False


def all_cells(suite: type[CompatSuite], world_size: int) -> Iterator[Cell]:
    """Yield the cells of a suite's matrix; ``world_size`` is for a matrix that names none."""
    return suite.matrix.cells(STRATEGIES.names(), PRECISIONS.names(), world_size)
