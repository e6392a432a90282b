"""Check ``clipping`` on hand-made traces: the optimizer gets gradients of another norm."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from pytest_distcompat.trace import StepInfo

if TYPE_CHECKING:
    from tests.checks.traces import Sound

REPLICAS = ("ddp-fp32-w2", "zero0-fp32-w2")
PARTS = ("fsdp1-fp32-w2", "fsdp2-fp32-w2", "zero1-fp32-w2", "zero3-fp32-w2")


@pytest.mark.parametrize("cell", REPLICAS)
def test_each_replica_gets_the_whole_gradient(sound: Sound, cell: str) -> None:
    # Not clipped: the norm is what it was.
    story = sound(cell).stepped({"square": 4.0}, action="step", nth=2, rank=1)
    assert story.findings("clipping") == [
        "step 3: rank 1: the gradients that the optimizer gets have norm 2; 1 in the reference (2e-04 allowed)"
    ]


@pytest.mark.parametrize("cell", PARTS)
def test_parts_are_added_up(sound: Sound, cell: str) -> None:
    # Each clipped to 1 by the norm of its own part.
    story = sound(cell).stepped({"square": 1.0}, action="step")
    message = "all ranks together: the gradients that the optimizer gets have norm 1.41421"
    assert story.findings("clipping") == [f"step 1: {message}; 1 in the reference (2e-04 allowed)"]
    # Uneven parts are as good as even ones.
    story = sound(cell).stepped({"square": 0.9}, action="step", rank=0)
    story = story.stepped({"square": 0.1}, action="step", rank=1)
    assert story.findings("clipping") == []


def test_parts_are_added_up_in_each_copy_of_hybrid_shards(sound: Sound) -> None:
    story = sound("fsdp2-fp32-w4-dp_replicate_2")
    assert story.findings("clipping") == []
    changed = story.stepped({"square": 0.75}, action="step", nth=2, rank=3)
    assert changed.findings("clipping") == [
        "step 3: ranks 2, 3 together: the gradients that the optimizer gets have norm 1.11803; 1 in the reference (2e-04 allowed)"
    ]
    # Enough in all, if copies were parts.
    story = story.stepped({"square": 0.25}, action="step")
    first, second = story.findings("clipping")
    assert first.startswith("step 1: ranks 0, 1 together: the gradi")
    assert second.startswith("step 1: ranks 2, 3 together: the gradi")


@pytest.mark.parametrize("cell", [*REPLICAS, *PARTS])
@pytest.mark.parametrize("factor", [0.25, 4.0])
def test_scaled_by_the_number_of_ranks(sound: Sound, cell: str, factor: float) -> None:
    story = sound(cell)
    square = story.trace.run().at("step", 0)[0].steps[0].square
    changed = story.stepped({"square": square * factor}, action="step", nth=19)
    findings = changed.findings("clipping")
    assert findings
    for finding in findings:
        assert finding.startswith("step 20: ")


def test_only_the_first_deviating_step_is_reported(sound: Sound) -> None:
    story = sound("ddp-fp32-w2").stepped({"square": 4.0}, action="step")
    first, second = story.findings("clipping")
    assert first.startswith("step 1:")
    assert second.startswith("step 1:")


def test_a_model_that_rounds_more_than_ours(sound: Sound) -> None:
    story = sound("ddp-bf16_upcast-w2").stepped({"square": 1.1**2}, action="step", nth=3)
    assert story.findings("clipping") != []
    exact = story.trace.run("reference")
    snapshots = []
    for snapshot in exact.snapshots:
        action = snapshot.action.replace("reference", "rounded")
        steps = tuple(replace(step, square=1.06**2) for step in snapshot.steps)
        snapshots.append(replace(snapshot, action=action, steps=steps))
    changed = story.with_run(replace(exact, name="rounded", snapshots=tuple(snapshots)))
    assert changed.findings("clipping") == []


def test_the_precision_says_how_far_off_is_too_far(sound: Sound) -> None:
    def findings_of(cell: str, square: float) -> list[str]:
        story = sound(cell).stepped({"square": square}, action="step", nth=0)
        return story.findings("clipping")

    assert findings_of("ddp-fp32-w2", 1.0001) == []
    assert findings_of("ddp-fp32-w2", 1.001) != []
    assert findings_of("ddp-bf16_upcast-w2", 1.001) == []
    assert findings_of("ddp-bf16_upcast-w2", 1.1) != []


def test_several_optimizers_are_one_gradient(sound: Sound) -> None:
    half = StepInfo("AdamW", ("float32",), ("float32",), ("float32",), square=0.5)
    story = sound("ddp-fp32-w2").snapshot("step", {"steps": (half, half)})
    assert story.findings("clipping") == []


def test_optimizers_whose_gradients_other_ranks_hold(sound: Sound) -> None:
    """Muon has the shards of matrices, AdamW parameters that each rank holds whole."""
    sharded = StepInfo("Muon", ("float32",), ("float32",), ("float32",), square=0.25, holders=(0, 1))
    replicated = replace(sharded, optimizer="AdamW", square=0.5, holders=())
    story = sound("fsdp2-fp32-w2").snapshot("step", {"steps": (sharded, replicated)})
    assert story.findings("clipping") == []
    story = sound("fsdp2-fp32-w2").snapshot("step", {"steps": (replicated, sharded)})
    assert story.findings("clipping") == []


def test_no_step_is_no_gradient(sound: Sound) -> None:
    story = sound("fsdp2-fp32-w2").snapshot("step", {"steps": ()}, nth=0)
    assert story.findings("clipping") == [
        "step 1: all ranks together: the gradients that the optimizer gets have norm 0; 1 in the reference (2e-04 allowed)"
    ]


@pytest.mark.parametrize(("run", "action"), [("train", "step"), ("reference", "reference")])
def test_silence_is_no_proof(sound: Sound, run: str, action: str) -> None:
    story = sound("ddp-fp32-w2").without(action, run=run, nth=19)
    assert story.findings("clipping") == ["step 20: no reference to compare with"]


def test_infinite_gradients_are_no_agreement(sound: Sound) -> None:
    story = sound("ddp-fp32-w2").stepped({"square": math.inf}, run="reference", action="reference", nth=1)
    changed = story.stepped({"square": math.inf}, action="step", nth=1, rank=0)
    first, *_ = changed.findings("clipping")
    assert first == (
        "step 2: rank 0: the gradients that the optimizer gets have norm inf; inf in the reference (2e-04 allowed)"
    )


def test_a_reference_of_zero(sound: Sound) -> None:
    story = sound("ddp-fp32-w2").stepped({"square": 0.0}, run="reference", action="reference", nth=1)
    first, *_ = story.findings("clipping")
    assert "have norm 1; 0 in the reference" in first
    changed = story.stepped({"square": 1e-10}, action="step", nth=1)
    assert changed.findings("clipping") == []
