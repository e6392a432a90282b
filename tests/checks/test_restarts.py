"""Check ``restarts`` on hand-made traces: a resumed run saves, and another resumes from that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import pytest

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks import CHECKS
from pytest_distcompat.driver import Driver

if TYPE_CHECKING:
    from tests.checks.traces import Story

RunsOf = Callable[[str, str], "Story"]
CELLS = ("ddp-fp32-w2", "fsdp2-fp32-w4", "zero1-bf16_upcast-w2")


@pytest.mark.parametrize("cell", CELLS)
def test_a_run_that_goes_on(runs_of: RunsOf, cell: str) -> None:
    assert runs_of(cell, "restarts").findings("restarts") == []


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize(
    ("run", "nth", "words"), [("second", 4, "loss 5 after the load"), ("third", 2, "loss 3 after the second load")]
)
def test_a_loss_is_another(runs_of: RunsOf, cell: str, run: str, nth: int, words: str) -> None:
    story = runs_of(cell, "restarts").snapshot("step", {"loss": 0.5}, run=run, nth=nth, rank=1)
    (finding,) = story.findings("restarts")
    assert finding.startswith(f"rank 1: {words} is 0.5; 0.1")


def test_after_a_wrong_step_no_other_is_compared(runs_of: RunsOf) -> None:
    story = runs_of("ddp-fp32-w2", "restarts")
    for run, nth in (("second", 3), ("second", 4), ("third", 0), ("third", 3)):
        story = story.snapshot("step", {"loss": 0.5}, run=run, nth=nth)
    assert [finding.partition(" is ")[0] for finding in story.findings("restarts")] == [
        "rank 0: loss 4 after the load",
        "rank 1: loss 4 after the load",
    ]


def test_a_rank_reports_no_loss(runs_of: RunsOf) -> None:
    story = runs_of("ddp-fp32-w2", "restarts").snapshot("step", {"loss": None}, run="third", nth=0, rank=0)
    expected = "rank 0: no loss to compare in step 1 after the second load; expected step() to return it"
    assert story.findings("restarts") == [expected]


def test_the_learning_rate_is_that_of_another_step(runs_of: RunsOf) -> None:
    story = runs_of("ddp-fp32-w2", "restarts")
    story = story.optimizer({"param_groups": ({"lr": 0.1},)}, run="third", action="step", nth=3, rank=0)
    (finding,) = story.findings("restarts")
    assert finding.startswith("rank 0: lr of the optimizer's group 0 is 0.1 in step 4 after the second load; ")


def test_what_the_resumed_run_saved_does_not_come_back(runs_of: RunsOf) -> None:
    story = runs_of("ddp-fp32-w2", "restarts")
    story = story.snapshot("load", {"scheduler": "last_epoch=3"}, run="third", rank=1)
    expected = "rank 1: scheduler is at 'last_epoch=3' after the second load; saved at 'last_epoch=6'"
    assert story.findings("restarts") == [expected]
    lost = story.parameters({"digest": "14:3"}, only="outlet.weight", run="third", action="load")
    assert "parameter 'outlet.weight': other values after the second load" in lost.findings("restarts")


def test_the_first_of_two_saves_does_not_come_back(runs_of: RunsOf) -> None:
    story = runs_of("ddp-fp32-w2", "restarts")
    lost = story.parameters({"digest": "14:3"}, only="outlet.weight", run="first_save", action="load")
    expected = "parameter 'outlet.weight': other values after the load of the first of two saves"
    assert expected in lost.findings("restarts")
    story = story.snapshot("step", {"loss": 0.5}, run="first_save", nth=1, rank=1)
    (finding,) = story.findings("restarts")
    assert finding.startswith("rank 1: loss 2 after the load of the first of two saves is 0.5; 0.1")


def test_a_driver_that_keeps_one_save_has_no_run_of_the_first() -> None:
    names = [run.name for run in CHECKS.get("restarts").runs(Cell.parse("ddp-fp32-w2"), Driver).runs]
    assert names == ["train", "second", "third"]


def test_a_rank_does_not_load(runs_of: RunsOf) -> None:
    story = runs_of("ddp-fp32-w2", "restarts")
    run = replace(story.trace.run("third"), snapshots=())
    story = replace(story, trace=replace(story.trace, runs={**story.trace.runs, "third": run}))
    assert "rank 0, 1: no report after the second load" in story.findings("restarts")


class Accumulates(Driver):
    """Supports the option."""

    options: ClassVar[tuple[str, ...]] = ("grad_accum", "compile")


@pytest.mark.parametrize(
    ("driver", "cell", "reason"),
    [
        (Driver, "ddp-fp32-w2", ""),
        (Accumulates, "ddp-fp32-w2", "it is tried with grad_accum"),
        (Accumulates, "ddp-fp32-w2-grad_accum_2", ""),
        (Accumulates, "ddp-fp32-w2-compile-grad_accum_2", "a second load is tried without that option"),
        (Accumulates, "ddp-fp32-w2-model_mlp-grad_accum_2", ""),
        (Driver, "ddp-bf16_upcast-w2", ""),
        (Driver, "ddp-bf16_upcast-w4", "in lower precision sums of more than two ranks"),
    ],
)
def test_where_it_applies(driver: type[Driver], cell: str, reason: str) -> None:
    actual_reason = CHECKS.get("restarts").not_applicable(Cell.parse(cell), driver) or ""
    assert actual_reason.startswith(reason)
    assert bool(actual_reason) == bool(reason)
