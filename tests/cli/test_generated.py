"""The generated table of what a driver's methods bring is true of real runs."""

from __future__ import annotations

import pytest

from pytest_distcompat import Driver, check_driver
from pytest_distcompat.checks import CHECKS
from pytest_distcompat.drivers.torch import TorchDriver

from .generated import CELLS_OF_CHECKS, STEPS_OF_A_DRIVER, brought_by, cell_of

CELL = "ddp-fp32-w2-model_mlp"


class WithoutSave(TorchDriver):
    """A driver whose author has written three methods so far."""

    save = Driver.save
    load = Driver.load


class WithoutLoad(TorchDriver):
    """A driver whose author has written four methods so far."""

    load = Driver.load


def names_brought(row: int) -> list[str]:
    """Return the checks that a row of required methods brings in the first cell."""
    return [
        check.name for check in brought_by(STEPS_OF_A_DRIVER[row]) if cell_of(check, Driver) == "" and not check.limit
    ]


def test_every_check_is_brought_by_some_method() -> None:
    brought = {check.name for step in STEPS_OF_A_DRIVER for check in brought_by(step)}
    assert brought == {*CHECKS.names()}
    for step in STEPS_OF_A_DRIVER:
        assert not step.claim or step.words
    for check in CHECKS.by_name.values():
        assert cell_of(check, Driver) in {*CELLS_OF_CHECKS, None}


@pytest.mark.spawn
@pytest.mark.parametrize(
    ("driver", "rows"),
    [
        pytest.param(WithoutSave, 1, id="without save", marks=pytest.mark.nightly),
        pytest.param(WithoutLoad, 2, id="without load"),
    ],
)
def test_checks_pass_from_the_row_on_that_brings_them(driver: type[Driver], rows: int) -> None:
    possible = [name for row in range(rows) for name in names_brought(row)]
    later = [name for row in range(rows, 3) for name in names_brought(row)]
    verdicts = check_driver(driver, CELL, [*possible, *later], device="cpu")
    ended = {verdict.check: str(verdict.status) for verdict in verdicts}
    ended = {name: status for name, status in ended.items() if status != "skipped"}
    assert {name for name, status in ended.items() if status == "passed"} == {*possible} & {*ended}
    missing = "has no save()" if rows == 1 else "has no load()"
    assert any(missing in verdict.message for verdict in verdicts if verdict.check in later)
