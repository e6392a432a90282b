"""Check ``again`` on hand-made traces: one trainer trains a second time, and then loads what it saved."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from tests.checks.more_runs import Claims

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks import CHECKS
from pytest_distcompat.driver import Driver
from pytest_distcompat.drivers import find_driver

if TYPE_CHECKING:
    from tests.checks.traces import Story

RunsOf = Callable[[str, str], "Story"]
CELLS = ("ddp-fp32-w2", "fsdp1-fp32-w2", "fsdp2-fp32-w4", "zero1-fp32-w2", "zero3-fp32-w2")


@pytest.mark.parametrize("cell", CELLS)
def test_a_trainer_that_trains_again(runs_of: RunsOf, cell: str) -> None:
    assert runs_of(cell, "again").findings("again") == []


@pytest.mark.parametrize("cell", CELLS)
def test_the_loss_of_the_second_training_is_another(runs_of: RunsOf, cell: str) -> None:
    story = runs_of(cell, "again").snapshot("step", {"loss": 0.6}, run="again", nth=6)
    (finding,) = story.findings("again")
    assert finding.startswith("step 2 of the second training: the loss is 0.6; 0.5 in the reference (2.0e-01 off, ")


def test_losses_of_ranks_that_are_parts_of_a_sum(runs_of: RunsOf) -> None:
    story = runs_of("ddp-fp32-w2", "again")
    story = story.alter(
        lambda snapshot: replace(snapshot, loss=2 * (snapshot.loss or 0.0)), run="again_reference", action="reference"
    )
    assert story.findings("again") == []
    story = story.snapshot("step", {"loss": 0.3}, run="again", nth=6)
    (finding,) = story.findings("again")
    assert finding.startswith("step 2 of the second training: the loss is 0.6; 1 in the reference (4.0e-01 off, ")


def test_a_loss_with_a_plain_cause_says_which(runs_of: RunsOf) -> None:
    story = runs_of("ddp-fp32-w2", "again").snapshot("step", {"loss": 1.0}, run="again", nth=6)
    (finding,) = story.findings("again")
    assert finding.endswith(" allowed): 2 times the reference's (= the number of ranks)")
    story = runs_of("ddp-fp32-w2", "again").snapshot("step", {"loss": math.nan}, run="again", nth=6, rank=1)
    expected = "step 2 of the second training: rank 1: the loss of this step is nan; expected a finite number"
    assert story.findings("again")[0] == expected


def test_the_schedule_goes_on(runs_of: RunsOf) -> None:
    spent = {"param_groups": ({"lr": 0.003, "weight_decay": 0.01},)}
    story = runs_of("ddp-fp32-w2", "again").optimizer(spent, run="again", action="step", nth=5)
    first = "step 1 of the second training: rank"
    assert story.findings("again") == [
        f"{first} {rank}: the learning rate is 0.003; 0.05 in the reference" for rank in range(2)
    ]


def test_the_gradient_norm_is_another(runs_of: RunsOf) -> None:
    story = runs_of("ddp-fp32-w2", "again")
    story = story.snapshot("reference", {"grad_norm": 1.0}, run="again_reference", nth=5)
    assert story.findings("again") == []
    story = story.snapshot("step", {"grad_norm": 2.0}, run="again", nth=5, rank=1)
    (finding,) = story.findings("again")
    assert finding.startswith("step 1 of the second training: rank 1: the gradient norm is 2; 1 in the reference (")


def test_no_loss_or_no_step(runs_of: RunsOf) -> None:
    story = runs_of("ddp-fp32-w2", "again").snapshot("step", {"loss": None}, run="again", nth=5, rank=0)
    expected = "step 1 of the second training: no loss to compare; expected step() to return it on every rank"
    assert story.findings("again") == [f"{expected}, and reference()"]
    story = runs_of("ddp-fp32-w2", "again").snapshot("step", {"loss": None}, run="again", nth=9, rank=0)
    when = "after the load in the trainer that saved"
    assert story.findings("again") == [f"rank 0: no loss to compare in step 2 {when}; expected step() to return it"]


def test_what_was_saved_does_not_come_back(runs_of: RunsOf) -> None:
    story = runs_of("ddp-fp32-w2", "again")
    lost = story.parameters({"digest": "14:3"}, only="outlet.weight", run="again", action="load")
    expected = "parameter 'outlet.weight': other values after the load in the trainer that saved"
    assert expected in lost.findings("again")
    story = story.snapshot("load", {"scheduler": "last_epoch=8"}, run="again", rank=1)
    assert story.findings("again") == [
        "rank 1: scheduler is at 'last_epoch=8' after the load in the trainer that saved; saved at 'last_epoch=3'"
    ]


def test_the_steps_after_the_load_are_others(runs_of: RunsOf) -> None:
    story = runs_of("ddp-fp32-w2", "again")
    for nth in (8, 9):
        story = story.snapshot("step", {"loss": 0.6}, run="again", nth=nth, rank=1)
    when = "after the load in the trainer that saved"
    assert story.findings("again") == [f"rank 1: loss 1 {when} is 0.6; 0.25 when it was saved"]


@pytest.mark.parametrize(
    ("driver", "cell", "reason"),
    [
        (Claims, "fsdp2-fp32-w2", None),
        (Claims, "fsdp2-fp32-w2-model_mlp", None),
        (Claims, "fsdp2-bf16_upcast-w2", "in fp32"),
        (Claims, "fsdp2-fp32-w2-compile", "without that option"),
        (Driver, "fsdp2-fp32-w2", "no again()"),
        (find_driver("trainer"), "zero3-fp32-w2", None),
        (find_driver("torch"), "fsdp2-fp32-w2", "no again()"),
        (find_driver("trainer"), "ddp-fp32-w2-model_dropout", "does not draw"),
    ],
)
def test_where_it_applies(driver: type[Driver], cell: str, reason: str | None) -> None:
    actual_reason = CHECKS.get("again").not_applicable(Cell.parse(cell), driver)
    assert (actual_reason is None) == (reason is None)
    assert reason is None or reason in str(actual_reason)
