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
from pytest_distcompat.checks import CHECKS, Check
from pytest_distcompat.drivers import find_driver
from pytest_distcompat.drivers.accelerate import AccelerateDriver
from pytest_distcompat.judge import judge
from pytest_distcompat.runner import Runner
from pytest_distcompat.scenario import REFERENCE_RUN, TRAIN_RUN, Scenario
from pytest_distcompat.strategies import STRATEGIES
from pytest_distcompat.trace import Trace

if TYPE_CHECKING:
    from .declare import Twin

for path in sorted(Path(__file__).parent.glob("twins_*.py")):
    importlib.import_module(f"twins.{path.stem}")
# As the twins' modules know it; a relative import here would make a second copy of the list.
TWINS: tuple[Twin, ...] = tuple(importlib.import_module("twins.declare").TWINS)

pytestmark = pytest.mark.spawn


@functools.cache
def run(runner: Runner, driver: str, cell: Cell, scenario: Scenario) -> Trace:
    """Read once for all checks and, of a sound driver, for all its twins."""
    return runner.trace(driver, cell, scenario)


def verdict(runner: Runner, driver: str, cell: Cell, name: str) -> tuple[str, str]:
    """Status and message."""
    check = CHECKS.get(name)
    found = judge(check, cell, run(runner, driver, cell, check.runs(cell, find_driver(driver))))
    return found.status, by_rank(found.message)


def by_rank(message: str) -> str:
    """Return the message with a line for each rank: what ranks have in common is one line."""

    def lines(found: re.Match[str]) -> str:
        before, ranks, after = found.groups()
        return "\n".join(f"{before}rank {rank}{after}" for rank in ranks.split(", "))

    return re.sub(r"^(.*?)ranks ([\d, ]+)(: .*)$", lines, message, flags=re.MULTILINE)


def bystanders(twin: Twin) -> Iterable[Check]:
    """The other checks that need no run of the wrong driver beyond those that its own check needed."""
    driver = find_driver(twin.driver)
    here = {TRAIN_RUN, REFERENCE_RUN, *CHECKS.get(twin.check).runs(twin.cell, driver).runs}
    for check in CHECKS.by_name.values():
        if check.name == twin.check or check.not_applicable(twin.cell, driver):
            continue
        if here.issuperset(check.runs(twin.cell, driver).runs):
            yield check


def bystander(runner: Runner, twin: Twin, check: Check) -> tuple[str, str]:
    """Status and message of another check; the reference is the sound driver's, which has run it already."""
    runs = []
    for one in check.runs(twin.cell, find_driver(twin.driver)).runs:
        driver = twin.sound if one == REFERENCE_RUN else twin.driver
        before = TRAIN_RUN if one.after else None
        scenario = Scenario(one.name, (before, one) if before else (one,))
        runs.append(run(runner, driver, twin.cell, scenario).run(one.name))
    found = judge(check, twin.cell, Trace.of(twin.driver, runs))
    return found.status, by_rank(found.message)


def daily(twin: Twin) -> bool:
    """Tell whether it is declared so, or is the first twin of its check: every check fails daily on one."""
    return twin.daily or next(one for one in TWINS if one.check == twin.check) is twin


PARAMETERS = [pytest.param(twin, id=twin.id, marks=() if daily(twin) else pytest.mark.nightly) for twin in TWINS]


@pytest.mark.parametrize("twin", PARAMETERS)
def test_the_check_finds_the_defect_and_no_other_check_is_misled(twin: Twin, runner: Runner) -> None:
    assert verdict(runner, twin.sound, twin.cell, twin.check) == ("passed", "")
    status, message = verdict(runner, twin.driver, twin.cell, twin.check)
    assert status == "failed", f"not caught: {twin}"
    assert re.search(twin.match, message), message
    for check in bystanders(twin):
        status, message = bystander(runner, twin, check)
        if check.name in twin.also:
            assert status == "failed", f"{check.name} says nothing of it"
            assert re.search(twin.also[check.name], message), f"{check.name}: {message}"
        else:
            assert status == "passed", f"{check.name}: {message}"


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("twin", "kind", "story"),
    [
        ("LeavesEarly", "failed", "rank 0 needed rank 1, which had finished: it raised RuntimeError: "),
        (
            "LeavesEarlyAndWaits",
            "hung",
            "time limit of 30 s: different collectives: rank 0 waits in all_gather .*; rank 1 waits in barrier ",
        ),
    ],
)
def test_an_evaluation_of_which_a_rank_leaves_early(
    runner: Runner, monkeypatch: pytest.MonkeyPatch, twin: str, kind: str, story: str
) -> None:
    monkeypatch.setattr(runner, "timeout", 30)
    status, message = verdict(runner, f"twins.twins_rows:{twin}", Cell.parse("ddp-fp32-w2"), "evaluation")
    assert (status, bool(re.match(story, message))) == (kind, True), message


@pytest.mark.nightly
def test_ddp_that_is_not_told_of_unused_parameters_fails(runner: Runner) -> None:
    """No twin: the run ends, so that every check fails."""
    cell = Cell.of("ddp", "fp32", model="branch")
    assert verdict(runner, "torch", cell, "gradients") == ("passed", "")
    status, message = verdict(runner, "twins.twins_odd_models:NotToldOfUnused", cell, "gradients")
    assert status == "failed"
    assert "Expected to have finished reduction in the prior iteration before starting a new one" in message


@pytest.mark.parametrize("check", CHECKS.names())
def test_every_check_has_twins_with_and_without_flat_masters(check: str) -> None:
    flat = {STRATEGIES.get(twin.cell.strategy).flat_masters for twin in TWINS if twin.check == check}
    assert flat >= {STRATEGIES.get(cell.strategy).flat_masters for cell in concerned(check)}


def concerned(check: str) -> Iterable[Cell]:
    """Ordinary cells in which the check says something: to some checks a strategy without units is nothing."""
    cells = (Cell(strategy, "fp32") for strategy in STRATEGIES.names())
    return (cell for cell in cells if not CHECKS.get(check).not_applicable(cell, AccelerateDriver))
