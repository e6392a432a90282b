"""A check that has never failed proves nothing: each has twins of a sound driver with one defect, on real gloo ranks."""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks import CHECKS
from pytest_distcompat.judge import judge
from pytest_distcompat.runner import Runner
from pytest_distcompat.scenario import TRAIN, Scenario
from pytest_distcompat.strategies import STRATEGIES
from pytest_distcompat.trace import Trace

if TYPE_CHECKING:
    from .declare import Twin

for path in sorted(Path(__file__).parent.glob("twins_*.py")):
    importlib.import_module(f"broken.{path.stem}")
# As the twins' modules know it; a relative import here would make a second copy of the list.
TWINS: tuple[Twin, ...] = tuple(importlib.import_module("broken.declare").TWINS)

pytestmark = pytest.mark.spawn


@functools.cache
def trace(runner: Runner, driver: str, cell: Cell, scenario: Scenario) -> Trace:
    """Read once for all checks and, of a sound driver, for all its twins."""
    return runner.trace(driver, cell, scenario)


def verdict(runner: Runner, driver: str, cell: Cell, name: str) -> tuple[str, str]:
    """Status and message."""
    check = CHECKS.get(name)
    found = judge(check, cell, trace(runner, driver, cell, check.scenario))
    return found.status, found.message


def others(check: str) -> Iterable[str]:
    """The checks that need no life beyond those that this one needed."""
    scenarios = {TRAIN, CHECKS.get(check).scenario}
    return (name for name, other in CHECKS.things.items() if name != check and other.scenario in scenarios)


@pytest.mark.parametrize("twin", TWINS, ids=lambda twin: twin.id)
def test_the_check_sees_the_defect_and_no_other_check_is_misled(twin: Twin, runner: Runner) -> None:
    assert verdict(runner, twin.sound, twin.cell, twin.check) == ("passed", "")
    status, message = verdict(runner, twin.driver, twin.cell, twin.check)
    assert status == "failed", f"not caught: {twin}"
    assert re.search(twin.match, message), message
    for name in others(twin.check):
        status, message = verdict(runner, twin.driver, twin.cell, name)
        if name in twin.also:
            assert status == "failed", f"{name} says nothing of it"
            assert re.search(twin.also[name], message), f"{name}: {message}"
        else:
            assert status == "passed", f"{name}: {message}"


@pytest.mark.parametrize("check", CHECKS.names())
def test_every_check_has_twins_with_and_without_flat_masters(check: str) -> None:
    flat = {STRATEGIES.get(twin.cell.strategy).flat_masters for twin in TWINS if twin.check == check}
    assert flat == {False, True}
