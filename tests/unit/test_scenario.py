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

#: What must have saved the files that an action reads.
SAVED_BY = {"load": "save", "reload": "export"}


def scenarios() -> dict[str, Scenario]:
    """Return every scenario of every check, for every built-in driver."""
    scenarios_by_id = {}
    for check in CHECKS.by_name.values():
        for driver in DRIVERS.by_name.values():
            if not check.not_applicable(CELL, driver):
                scenarios_by_id[f"{check.name}-{driver.name}"] = check.runs(CELL, driver)
    return scenarios_by_id


ALL = scenarios()


@pytest.mark.parametrize("scenario", ALL.values(), ids=list(ALL))
def test_a_run_loads_what_an_earlier_one_saved_or_itself(scenario: Scenario) -> None:
    saved: set[tuple[str, str]] = set()
    for run in scenario.runs:
        reads = files_of_others(run)
        assert bool(reads) == bool(run.after)
        for action in reads:
            assert (run.after, SAVED_BY[action]) in saved
        assert run.actions[0] in {"build_model", "reload"}
        saved.update((run.name, action) for action in run.actions)


def files_of_others(run: Run) -> set[str]:
    """Return the actions of a run that read what an earlier run has saved."""
    reads = {"load", "reload"}.intersection(run.actions)
    if "load" in reads:
        before = run.actions[: run.actions.index("load")]
        if "save" in before:
            # It loads what it has saved itself.
            reads.remove("load")
    return reads


@pytest.mark.parametrize("scenario", [RESUME, PARITY, EXPORT], ids=lambda scenario: scenario.name)
def test_scenarios_that_begin_alike_share_their_runs(scenario: Scenario) -> None:
    assert scenario.runs[: len(TRAIN.runs)] == TRAIN.runs


def test_a_resumed_run_takes_the_batches_that_the_first_took_after_saving() -> None:
    train, resume = RESUME.runs
    saved = train.actions.index("save")
    steps_before = train.actions[:saved].count("step")
    steps_after = train.actions[saved:].count("step")
    assert resume.first_step == train.first_step + steps_before
    assert resume.actions.count("step") <= steps_after


@pytest.mark.parametrize("name", CHECKS.names())
def test_the_last_snapshot_of_a_check_is_in_its_scenario(name: str) -> None:
    check = CHECKS.get(name)
    for driver in DRIVERS.by_name.values():
        if check.not_applicable(CELL, driver):
            continue
        actions = {}
        # Some runs are those of a cell with an adapter alone.
        for cell in (Cell.parse(f"{CELL}-lora"), CELL):
            for run in check.runs(cell, driver).runs:
                actions[run.name] = run.actions
        assert check.until
        for name_of_run, action, nth in check.until:
            assert actions[name_of_run].count(action) > nth


def test_the_reference_runs_in_one_process_and_keeps_what_changes_the_training() -> None:
    cell = Cell.of("fsdp2", "bf16_upcast", 4, model="mlp", grad_accum=2, compile=True, state_dict="full")
    assert REFERENCE_RUN.cell(cell).id == "ddp-bf16_upcast-w1-model_mlp-grad_accum_2"


def test_a_run_runs_in_the_cell_of_its_check_where_it_says_nothing_else() -> None:
    cell = Cell.of("fsdp1", "fp32", 4, state_dict="full")
    run = Run("one", ("build_model",))
    assert run.cell(cell) == cell
    run_in_ddp = Run("one", ("build_model",), strategy="ddp")
    assert run_in_ddp.cell(cell).id == "ddp-fp32-w4-state_dict_full"


@pytest.mark.parametrize("name", ALL)
def test_the_change_of_a_cell_is_all_that_the_cell_of_a_run_depends_on(name: str) -> None:
    """Thousands of runs are found by it in a report."""
    settings = "AdamW.amsgrad=true+TrainingArguments.weight_decay=0.1"
    cell = Cell.parse(f"fsdp2-bf16_upcast-w4-model_mlp-grad_accum_2-tp_2-set_{settings}")
    for run in ALL[name].runs:
        assert run.change_of_cell.cell(cell) == run.cell(cell)


def test_a_run_on_one_rank_is_on_one_node() -> None:
    cell = Cell("ddp", "fp32", 4, nodes=2)
    ranks_and_nodes = {}
    for run in reshard(cell).runs:
        run_cell = run.cell(cell)
        ranks_and_nodes[run.name] = (run_cell.world_size, run_cell.nodes)
    assert list(ranks_and_nodes.items()) == [
        ("train", (4, 2)),
        ("up", (8, 2)),
        ("back", (4, 2)),
        ("one", (1, 1)),
    ]


def test_a_plan_is_cut_into_the_trainings_of_one_trainer() -> None:
    runs = {run.name: run for run in ALL["again-trainer"].runs}
    plan = Plan(runs["again"].actions[1:], 0, Path("here"), Path("here"))
    first, second, third = plan.trainings()
    assert first.actions == ("build", "step", "step", "step", "save", "step", "step")
    assert second.actions == ("again", "step", "step", "step")
    assert second.first_step == 0
    assert second.last_step == 3
    assert third.actions == ("load", "step", "step")
    assert third.first_step == 3
    assert third.last_step == 5
    assert plan.next_steps() == [0, 1, 2, 3, 3, 4, 5, 0, 1, 2, 3, 3, 4, 5]
    resumed = Plan(("build", "load", "step", "save", "step"), 3, Path("here"), Path("there"))
    assert resumed.trainings() == [resumed]
