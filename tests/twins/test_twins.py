"""A check that has never failed proves nothing: each has twins of a sound driver with one defect, on real gloo ranks."""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from _pytest.mark import ParameterSet

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
    """Return the trace, read once for all checks; that of a sound driver serves all its twins."""
    return runner.trace(driver, cell, scenario)


def verdict(runner: Runner, driver: str, cell: Cell, name: str) -> tuple[str, str]:
    """Return status and message of a check."""
    check = CHECKS.get(name)
    scenario = check.runs(cell, find_driver(driver))
    judged = judge(check, cell, run(runner, driver, cell, scenario))
    return judged.status, by_rank(judged.message)


def by_rank(message: str) -> str:
    """Return the message with a line for each rank, where ranks share one."""

    def lines(match: re.Match[str]) -> str:
        before, ranks, after = match.groups()
        return "\n".join(f"{before}rank {rank}{after}" for rank in ranks.split(", "))

    return re.sub(r"^(.*?)ranks ([\d, ]+)(: .*)$", lines, message, flags=re.MULTILINE)


def bystanders(twin: Twin) -> Iterable[Check]:
    """Yield the other checks for which the runs of the twin's own check, training and reference are enough."""
    driver = find_driver(twin.driver)
    own_runs = CHECKS.get(twin.check).runs(twin.cell, driver).runs
    available = {TRAIN_RUN, REFERENCE_RUN, *own_runs}
    for check in CHECKS.by_name.values():
        if check.name == twin.check or check.not_applicable(twin.cell, driver):
            continue
        if available.issuperset(check.runs(twin.cell, driver).runs):
            yield check


def bystander(runner: Runner, twin: Twin, check: Check) -> tuple[str, str]:
    """Return status and message of another check; the reference is the sound driver's, which has run it already."""
    traces = []
    for plan in check.runs(twin.cell, find_driver(twin.driver)).runs:
        driver = twin.sound if plan == REFERENCE_RUN else twin.driver
        plans = (TRAIN_RUN, plan) if plan.after else (plan,)
        trace = run(runner, driver, twin.cell, Scenario(plan.name, plans))
        traces.append(trace.run(plan.name))
    judged = judge(check, twin.cell, Trace.of(twin.driver, traces))
    return judged.status, by_rank(judged.message)


def runs_daily(twin: Twin) -> bool:
    """Tell whether it is declared so, or is the first twin of its check: every check has one that runs daily."""
    first = next(other for other in TWINS if other.check == twin.check)
    return twin.daily or first is twin


def parameter(twin: Twin) -> ParameterSet:
    if runs_daily(twin):
        return pytest.param(twin, id=twin.id)
    return pytest.param(twin, id=twin.id, marks=pytest.mark.nightly)


PARAMETERS = [parameter(twin) for twin in TWINS]


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
@pytest.mark.parametrize(
    ("twin", "story"),
    [
        (
            "RefusesOnOneRank",
            "gather of empty: rank 1: ValueError: nothing to gather (not on all ranks, so no further call is made); ",
        ),
        (
            "LeavesOthers",
            "rank 1 raised RuntimeError: gather of float32: ValueError: nothing to gather on this rank, and another rank did not",
        ),
        (
            "OneMoreOnOneRank",
            "raised RuntimeError: exchanges() names other functions, or in another order, on some ranks; the ranks are to make 6",
        ),
    ],
)
def test_a_call_that_a_rank_leaves_early_is_named(runner: Runner, twin: str, story: str) -> None:
    """It pairs with no collective of the next call, which would be blamed."""
    cell = Cell.parse("ddp-fp32-w2")
    status, message = verdict(runner, f"twins.twins_exchanges:{twin}", cell, "exchanges")
    first_line, *_ = message.splitlines()
    assert status == "failed"
    assert story in first_line


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
    cells_of_twins = [twin.cell for twin in TWINS if twin.check == check]
    assert flat_masters(cells_of_twins) >= flat_masters(applicable_cells(check))


def flat_masters(cells: Iterable[Cell]) -> set[bool]:
    """Return whether strategies of these cells keep masters in flat tensors: True, False or both."""
    return {STRATEGIES.get(cell.strategy).flat_masters for cell in cells}


def applicable_cells(check: str) -> list[Cell]:
    """Return the cells in fp32 without options to which the check applies."""
    cells = [Cell(strategy, "fp32") for strategy in STRATEGIES.names()]
    return [cell for cell in cells if not CHECKS.get(check).not_applicable(cell, AccelerateDriver)]
