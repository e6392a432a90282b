"""Check ``midway`` on hand-made traces: an evaluation between two steps changes what is trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from pytest_distcompat.calls import observer
from pytest_distcompat.cell import Cell
from pytest_distcompat.checks import CHECKS
from pytest_distcompat.driver import Driver
from pytest_distcompat.drivers import Calls
from pytest_distcompat.scenario import EVALUATE, SAVED

if TYPE_CHECKING:
    from tests.checks.traces import Story

RunsOf = Callable[[str, str], "Story"]
CELLS = ("ddp-fp32-w2", "fsdp2-fp32-w4", "zero3-fp32-w2-grad_accum_2")


@pytest.mark.parametrize("cell", CELLS)
def test_an_evaluation_that_changes_nothing(runs_of: RunsOf, cell: str) -> None:
    assert runs_of(cell, "midway").findings("midway") == []


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize(
    "change",
    [
        ({"rng": "drawn"}, "the random state is another after the evaluation"),
        ({"scheduler": "stepped"}, "the scheduler is another after the evaluation"),
        ({"scaler": {"scale": 1.0}}, "the gradient scaler is another after the evaluation"),
    ],
)
def test_a_number_is_another(runs_of: RunsOf, cell: str, change: tuple[dict[str, Any], str]) -> None:
    changes, text = change
    story = runs_of(cell, "midway").snapshot(EVALUATE, changes, run="resume", rank=1)
    assert story.findings("midway") == [f"rank 1: {text}"]


def test_a_statistic_is_another(runs_of: RunsOf) -> None:
    story = runs_of("ddp-fp32-w2", "midway")
    story = story.buffers({"digest": "1:2"}, run="resume", action=EVALUATE, rank=0)
    (finding,) = story.findings("midway")
    assert finding.startswith("rank 0: buffer '")
    assert finding.endswith("': other values after the evaluation")


def test_a_statistic_that_ranks_have_apart_may_become_that_of_another(runs_of: RunsOf) -> None:
    story = runs_of("ddp-fp32-w2", "midway")
    other = {"run": "resume", "action": "step", "nth": 1, "rank": 1}
    story = story.buffers({"digest": "1:2"}, **other)
    assert story.findings("midway") == []


def test_the_model_stays_in_evaluation_mode(runs_of: RunsOf) -> None:
    story = runs_of("ddp-fp32-w2", "midway")
    story = story.snapshot("step", {"evaluating": ("",)}, run="resume", nth=2, rank=1)
    expected = "the whole model is in evaluation mode in the step after the evaluation"
    assert story.findings("midway") == [f"rank 1: {expected}; in training mode before it"]


def test_the_loss_of_the_next_step_is_another(runs_of: RunsOf) -> None:
    story = runs_of("ddp-fp32-w2", "midway")
    story = story.snapshot("step", {"loss": 0.5}, run="resume", nth=2, rank=1)
    expected = "the loss of the step after the evaluation is 0.5; 0.166667 in the run that never evaluated"
    assert story.findings("midway") == [f"rank 1: {expected}"]


def test_of_a_run_that_was_resumed_wrongly_no_loss_is_compared(runs_of: RunsOf) -> None:
    story = runs_of("ddp-fp32-w2", "midway")
    for nth in (1, 2):
        story = story.snapshot("step", {"loss": 0.5}, run="resume", nth=nth, rank=1)
    assert story.findings("midway") == []


def wrong_rate(step: int) -> str:
    """The finding about a step of the resumed run; the rate halves in each step of the training."""
    expected = f"{0.1 / 2 ** (SAVED + step):.6g} in the run that never stopped"
    return f"rank 1: lr of the optimizer's group 0 is 0.05 after step {step} of the resumed run; {expected}"


@pytest.mark.parametrize("first", [0, 1])
def test_a_rate_that_is_wrong_before_the_evaluation_is_said_once_and_no_loss_is_compared(
    runs_of: RunsOf, first: int
) -> None:
    story = runs_of("ddp-fp32-w2", "midway")
    for nth in range(first, 3):
        story = story.optimizer({"param_groups": ({"lr": 0.05},)}, run="resume", action="step", nth=nth, rank=1)
    story = story.optimizer({"param_groups": ({"lr": 0.05},)}, run="resume", action=EVALUATE, rank=1)
    story = story.snapshot("step", {"loss": 0.5}, run="resume", nth=2, rank=1)
    assert story.findings("midway") == [wrong_rate(first + 1)]


def test_a_rate_that_is_wrong_after_the_evaluation(runs_of: RunsOf) -> None:
    story = runs_of("ddp-fp32-w2", "midway")
    story = story.optimizer({"param_groups": ({"lr": 0.05},)}, run="resume", action="step", nth=2, rank=1)
    assert story.findings("midway") == [wrong_rate(3)]


def test_another_number_of_a_group_is_left_to_resume(runs_of: RunsOf) -> None:
    story = runs_of("ddp-fp32-w2", "midway")
    for nth in range(3):
        rate = 0.1 / 2 ** (SAVED + nth + 1)
        groups = ({"lr": rate, "weight_decay": 0.0},)
        story = story.optimizer({"param_groups": groups}, run="resume", action="step", nth=nth)
        groups = ({"lr": rate, "weight_decay": 0.1},)
        story = story.optimizer({"param_groups": groups}, action="step", nth=SAVED + nth)
    groups = ({"lr": 0.1 / 2 ** (SAVED + 2), "weight_decay": 0.0},)
    story = story.optimizer({"param_groups": groups}, run="resume", action=EVALUATE)
    assert story.findings("midway") == []


def test_a_silent_rank(runs_of: RunsOf) -> None:
    story = runs_of("ddp-fp32-w2", "midway").without(EVALUATE, run="resume", rank=1)
    assert story.findings("midway") == ["rank 1: no report after evaluation"]


class Evaluates(Driver):
    """Declares the calls that every trainer has."""

    options: ClassVar[tuple[str, ...]] = ("compile", "grad_accum")
    live_calls: ClassVar[type[Calls]] = Calls


class TrainsAlone(Calls):
    """Has no evaluation under one strategy."""

    refused: ClassVar[dict[str, dict[str, str]]] = {"fsdp2": {"evaluate*": "it hangs"}}

    @observer
    def evaluate(self) -> None:  # type: ignore[override]  # it is not called
        """Evaluate."""


class Refuses(Evaluates):
    """Declares that call as refused."""

    live_calls: ClassVar[type[Calls]] = TrainsAlone


@pytest.mark.parametrize(
    ("driver", "cell", "reason"),
    [
        (Driver, "ddp-fp32-w2", "the driver declares no call evaluate()"),
        (Evaluates, "ddp-fp32-w2", ""),
        (Evaluates, "ddp-fp32-w2-grad_accum_2", ""),
        (Evaluates, "ddp-fp16_mixed-w2", ""),
        (Evaluates, "ddp-bf16_pure-w2", "in bf16_pure an evaluation does what it does in fp32"),
        (Evaluates, "ddp-fp32-w2-compile", "an evaluation between steps is not tried with option 'compile'"),
        (Refuses, "ddp-fp32-w2", ""),
        (Refuses, "fsdp2-fp32-w2", "it hangs"),
    ],
)
def test_where_it_applies(driver: type[Driver], cell: str, reason: str) -> None:
    parsed = Cell.parse(cell)
    actual_reason = CHECKS.get("midway").not_applicable(parsed, driver)
    _, resumed = CHECKS.get("resume").runs(parsed, driver).runs
    if reason:
        assert actual_reason is not None
        assert actual_reason.startswith(reason)
        assert EVALUATE not in resumed.actions
    else:
        assert not actual_reason
        assert EVALUATE in resumed.actions
