"""The scenarios are what checks rely on."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks import CHECKS
from pytest_distcompat.driver import Plan
from pytest_distcompat.drivers import DRIVERS
from pytest_distcompat.scenario import EXPORT, PARITY, REFERENCE_RUN, RESUME, TRAIN, Run, Scenario, reshard

CELL = Cell.parse("fsdp2-fp32-w2")

#: Every scenario of every check, for every built-in driver.
ALL = {
    f"{name}-{driver.name}": check.runs(CELL, driver)
    for name, check in CHECKS.by_name.items()
    for driver in DRIVERS.by_name.values()
    if not check.not_applicable(CELL, driver)
}


@pytest.mark.parametrize("scenario", ALL.values(), ids=list(ALL))
def test_a_run_loads_what_an_earlier_one_saved_or_itself(scenario: Scenario) -> None:
    saved: set[tuple[str, str]] = set()
    for run in scenario.runs:
        needs = {action for action in ("load", "reload") if action in run.actions}
        if "load" in run.actions and "save" in run.actions[: run.actions.index("load")]:
            # It loads what it has saved itself.
            needs.discard("load")
        assert bool(needs) == bool(run.after)
        for action in needs:
            assert (run.after, {"load": "save", "reload": "export"}[action]) in saved
        assert run.actions[0] in {"build_model", "reload"}
        saved |= {(run.name, action) for action in ("save", "export") if action in run.actions}


@pytest.mark.parametrize("scenario", [RESUME, PARITY, EXPORT], ids=lambda scenario: scenario.name)
def test_scenarios_that_begin_alike_share_their_runs(scenario: Scenario) -> None:
    assert scenario.runs[: len(TRAIN.runs)] == TRAIN.runs


def test_a_resumed_run_takes_the_batches_that_the_first_took_after_saving() -> None:
    train, resume = RESUME.runs
    before = train.actions[: train.actions.index("save")].count("step")
    assert resume.first_step == train.first_step + before
    assert resume.actions.count("step") <= train.actions.count("step") - before


@pytest.mark.parametrize("name", CHECKS.names())
def test_the_last_snapshot_of_a_check_is_in_its_scenario(name: str) -> None:
    check = CHECKS.get(name)
    for driver in DRIVERS.by_name.values():
        if check.not_applicable(CELL, driver):
            continue
        actions = {run.name: run.actions for run in check.runs(CELL, driver).runs}
        assert check.until
        for run, action, nth in check.until:
            assert actions[run].count(action) > nth


def test_the_reference_runs_in_one_process_and_keeps_what_changes_the_training() -> None:
    cell = Cell.of("fsdp2", "bf16_upcast", 4, model="mlp", grad_accum=2, compile=True, state_dict="full")
    assert REFERENCE_RUN.cell(cell).id == "ddp-bf16_upcast-w1-model_mlp-grad_accum_2"


def test_a_run_runs_in_the_cell_of_its_check_where_it_says_nothing_else() -> None:
    cell = Cell.of("fsdp1", "fp32", 4, state_dict="full")
    assert Run("one", ("build_model",)).cell(cell) == cell
    assert Run("one", ("build_model",), strategy="ddp").cell(cell).id == "ddp-fp32-w4-state_dict_full"


def test_a_run_on_one_rank_is_on_one_node() -> None:
    cell = Cell("ddp", "fp32", 4, nodes=2)
    nodes = [(run.name, run.cell(cell).world_size, run.cell(cell).nodes) for run in reshard(cell).runs]
    assert nodes == [("train", 4, 2), ("up", 8, 2), ("back", 4, 2), ("one", 1, 1)]


def test_a_plan_is_cut_into_the_trainings_of_one_trainer() -> None:
    again = next(run for run in ALL["again-trainer"].runs if run.name == "again")
    plan = Plan(again.actions[1:], 0, Path("here"), Path("here"))
    first, second, third = plan.trainings()
    assert first.actions == ("build", "step", "step", "step", "save", "step", "step")
    assert (second.actions, second.first_step, second.last_step) == (("again", *("step",) * 3), 0, 3)
    assert (third.actions, third.first_step, third.last_step) == (("load", "step", "step"), 3, 5)
    assert plan.next_steps() == [0, 1, 2, 3, 3, 4, 5, 0, 1, 2, 3, 3, 4, 5]
    resumed = Plan(("build", "load", "step", "save", "step"), 3, Path("here"), Path("there"))
    assert resumed.trainings() == [resumed]
