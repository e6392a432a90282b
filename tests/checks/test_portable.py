"""Check ``portable`` on hand-made traces: state that is lost under another strategy."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks import CHECKS
from pytest_distcompat.drivers.accelerate import AccelerateDriver
from pytest_distcompat.drivers.torch import TorchDriver
from pytest_distcompat.trace import StepInfo

if TYPE_CHECKING:
    from tests.checks.traces import Story

    from pytest_distcompat.trace import Snapshot

RunsOf = Callable[[str, str], "Story"]


@pytest.mark.parametrize("cell", ["ddp-fp32-w2", "fsdp1-fp32-w2", "fsdp2-fp32-w4", "zero1-fp32-w2", "zero3-fp32-w2"])
def test_sound(runs_of: RunsOf, cell: str) -> None:
    assert runs_of(cell, "portable").findings("portable") == []


def test_a_parameter_with_other_values(runs_of: RunsOf) -> None:
    # The live names are those of fsdp2.
    story = runs_of("fsdp1-fp32-w2", "portable")
    other = with_parameter(story, "outlet.weight", {"digest": "3:1"}, run="port", action="load", rank=0)
    assert other.findings("portable") == ["parameter 'outlet.weight': other values after the load under fsdp2"]


def with_parameter(story: Story, name: str, changes: dict[str, Any], **where: Any) -> Story:
    """Return the story with other fields of the parameter of that live name."""

    def change(snapshot: Snapshot) -> Snapshot:
        assert snapshot.model is not None
        parameters = []
        for info in snapshot.model.parameters:
            if info.name == name:
                parameters.append(replace(info, **changes))
            else:
                parameters.append(info)
        return replace(snapshot, model=replace(snapshot.model, parameters=tuple(parameters)))

    return story.alter(change, **where)


def test_shared_steps_count_several_times(runs_of: RunsOf) -> None:
    story = runs_of("ddp-fp32-w2", "portable")
    twice = story.state("step", {"digest": "1:c0000000c"}, run="port", action="step", nth=0)
    assert twice.findings("portable") == [
        "step 'inlet.weight' and 1 others: other values one step after the load under fsdp2",
    ]


@pytest.mark.parametrize("nth", [0, 1])
def test_a_loss_that_the_first_run_did_not_have(runs_of: RunsOf, nth: int) -> None:
    story = runs_of("fsdp2-fp32-w2", "portable").snapshot("step", {"loss": 7.0}, run="port", nth=nth, rank=1)
    expected = {0: "0.25", 1: "0.2"}[nth]
    assert story.findings("portable") == [
        f"rank 1: loss {nth + 1} after the load under ddp is 7; {expected} in the run that never stopped (4e-05 allowed)"
    ]


def test_in_lower_precision_losses_are_the_strategies_own_matter(runs_of: RunsOf) -> None:
    story = runs_of("fsdp2-bf16_upcast-w2", "portable").snapshot("step", {"loss": 0.26}, run="port", nth=0)
    assert story.findings("portable") == []


def test_no_loss(runs_of: RunsOf) -> None:
    story = runs_of("fsdp2-fp32-w2", "portable").snapshot("step", {"loss": None}, run="port", nth=0, rank=1)
    assert story.findings("portable") == ["rank 1: no loss to compare; expected step() to return it"]


@pytest.mark.parametrize("cell", ["zero1-fp32-w2", "zero3-fp32-w2"])
def test_weights_that_are_not_the_masters(runs_of: RunsOf, cell: str) -> None:
    story = runs_of(cell, "portable")
    other = with_parameter(story, "inlet.weight", {"digest": "3:1"}, run="port", action="build", rank=1)
    assert other.findings("portable") == ["parameter 'inlet.weight': other values after the export and build"]


def test_steps_and_losses_of_a_flat_source_are_compared(runs_of: RunsOf) -> None:
    story = runs_of("fsdp1-fp32-w2", "portable").parameters({"kind": "FlatParameter", "digest": "9:9"}, action="save")
    assert story.findings("portable") == []
    twice = story.state("step", {"digest": "1:c0000000c"}, run="port", action="step", nth=0)
    assert twice.findings("portable") == [
        "step 'inlet.weight' and 1 others: other values one step after the load under fsdp2"
    ]
    late = story.snapshot("step", {"loss": 7.0}, run="port", nth=1)
    assert [finding[:14] for finding in late.findings("portable")] == ["rank 0: loss 2", "rank 1: loss 2"]


def test_losses_of_a_flat_source_are_compared_in_lower_precision_too(runs_of: RunsOf) -> None:
    story = runs_of("fsdp1-bf16_upcast-w2-no_use_orig_params", "portable")
    story = story.parameters({"kind": "FlatParameter", "digest": "9:9"}, action="save")
    assert story.findings("portable") == []
    late = story.snapshot("step", {"loss": 7.0}, run="port", nth=1)
    assert [finding[:14] for finding in late.findings("portable")] == ["rank 0: loss 2", "rank 1: loss 2"]


def test_a_loss_that_is_no_number(runs_of: RunsOf) -> None:
    story = runs_of("fsdp1-bf16_upcast-w2", "portable").snapshot("step", {"loss": math.nan}, run="port", nth=0, rank=1)
    message = "rank 1: the loss of step 1 after the load under fsdp2 is nan; expected a finite number"
    assert story.findings("portable") == [message]


def test_infinite_losses_are_no_agreement(runs_of: RunsOf) -> None:
    story = runs_of("fsdp1-fp32-w2", "portable")
    story = story.snapshot("step", {"loss": math.inf}).snapshot("step", {"loss": math.inf}, run="port", nth=1)
    message = "the loss of step 2 after the load under fsdp2 is inf; expected a finite number"
    expected = [finding for finding in story.findings("portable") if "inf;" in finding]
    assert [f"rank {rank}: {message}" for rank in (0, 1)] == expected


def test_training_again_is_no_load(runs_of: RunsOf) -> None:
    step = StepInfo("AdamW", ("float32",), ("float32",), ("float32",), square=1.0)
    story = runs_of("fsdp1-fp32-w2", "portable").snapshot("step", {"steps": (step,)})
    changed = story.snapshot("load", {"steps": (step, step)}, run="port")
    assert changed.findings("portable") == []
    changed = story.snapshot("load", {"steps": (step, step, step)}, run="port", rank=1)
    (finding,) = changed.findings("portable")
    assert finding.startswith("rank 1: the optimizer took 3 steps with gradients during the load")


def test_parts_that_do_not_make_a_whole_tensor(runs_of: RunsOf) -> None:
    cut = {"local_numel": 2, "digest": "2:7"}
    story = runs_of("zero3-fp32-w2", "portable")
    story = with_parameter(story, "inlet.weight", cut, run="port", action="build", rank=1)
    (finding,) = story.findings("portable")
    assert finding.startswith("parameter 'inlet.weight': the parts of all ranks are ")
    assert finding.endswith(" after the export and build")


@pytest.mark.parametrize(
    ("cell", "reason"),
    [
        ("ddp-fp32-w2", "does not claim that another strategy loads a checkpoint of ddp"),
        ("fsdp1-fp32-w2", ""),
        ("zero3-fp32-w2", ""),
    ],
)
def test_where_accelerate_claims_it(cell: str, reason: str) -> None:
    actual_reason = CHECKS.get("portable").not_applicable(Cell.parse(cell), AccelerateDriver)
    assert reason in (actual_reason or "")
    assert bool(actual_reason) == bool(reason)


@pytest.mark.parametrize(
    ("cell", "reason"),
    [
        ("fsdp2-fp32-w2-state_dict_full", "ddp cannot go on from it: DDP has one form of state dict"),
        ("fsdp1-fp32-w2-no_use_orig_params-state_dict_full", ""),
        ("ddp-fp32-w2-save_only_model", "hold the model alone"),
    ],
)
def test_where_torch_claims_it(cell: str, reason: str) -> None:
    actual_reason = CHECKS.get("portable").not_applicable(Cell.parse(cell), TorchDriver)
    assert reason in (actual_reason or "")
    assert bool(actual_reason) == bool(reason)
