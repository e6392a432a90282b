"""Check ``scaling`` on hand-made traces: no loss scale, scales that differ, an overflow that is not skipped."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from pytest_distcompat.checks import CHECKS
from pytest_distcompat.driver import Driver
from pytest_distcompat.drivers.torch import TorchDriver
from pytest_distcompat.trace import RunTrace, Snapshot, Trace

if TYPE_CHECKING:
    from tests.checks.traces import Sound, Story

DDP = "ddp-fp16_mixed-w2"
CELLS = ("ddp-fp16_mixed-w2", "fsdp1-fp16_mixed-w2", "zero1-fp16_mixed-w2")
#: The action, the step of training that it looks like, and the scale after it.
ACTIONS = (("step", 0, 1024.0), ("overflow", 0, 512.0), ("step", 1, 512.0))


def overflowing(story: Story) -> Story:
    """Return the training with an overflow in the second step that all ranks skip."""
    train = story.trace.run()
    snapshots: list[Snapshot] = []
    for index, (action, nth, scale) in enumerate(ACTIONS):
        for snapshot in train.at("step", nth):
            seen = replace(snapshot, run="overflow", action=action, index=index, scaler={"scale": scale})
            snapshots.append(seen)
    run = RunTrace("overflow", train.world_size, tuple(snapshots))
    return replace(story, trace=Trace.of("hand-made", [run]))


def alter(story: Story, action: str, changes: dict[str, Any], **where: Any) -> Story:
    return story.snapshot(action, changes, run="overflow", **where)


@pytest.mark.parametrize("cell", CELLS)
def test_sound(sound: Sound, cell: str) -> None:
    assert overflowing(sound(cell)).findings("scaling") == []


@pytest.mark.parametrize("cell", CELLS)
def test_no_scaler(sound: Sound, cell: str) -> None:
    story = overflowing(sound(cell))
    for action in ("step", "overflow"):
        story = alter(story, action, {"scaler": {}})
    assert story.findings("scaling") == on_both_ranks("nothing scales the loss; small gradients vanish in float16")


def on_both_ranks(message: str) -> list[str]:
    return [f"rank 0: {message}", f"rank 1: {message}"]


def test_a_scale_of_one(sound: Sound) -> None:
    story = alter(overflowing(sound(DDP)), "step", {"scaler": {"scale": 1.0}}, nth=0)
    first, second, *_ = story.findings("scaling")
    assert [first, second] == on_both_ranks("the loss is scaled by 1; expected more than 1")


@pytest.mark.parametrize("scale", [float("inf"), float("nan")])
def test_a_scale_that_is_no_number(sound: Sound, scale: float) -> None:
    story = alter(overflowing(sound(DDP)), "step", {"scaler": {"scale": scale}}, nth=0)
    first, *_ = story.findings("scaling")
    assert first == f"rank 0: the loss is scaled by {scale}; expected a finite number"


SCALE_STAYS = on_both_ranks("the scale is 1024 after an overflow at 1024; expected a smaller one")


def bearing(story: Story, before: dict[str, float], after: dict[str, float]) -> list[str]:
    """Return the findings where the scale stays 1024, with these other numbers of the scaler before and after."""
    scaler_before = {"scale": 1024.0, **before}
    scaler_after = {"scale": 1024.0, **after}
    story = alter(story, "step", {"scaler": scaler_before}, nth=0)
    story = alter(story, "overflow", {"scaler": scaler_after}, nth=0)
    story = alter(story, "step", {"scaler": scaler_after}, nth=1)
    return story.findings("scaling")


def test_a_scale_that_bears_an_overflow_first(sound: Sound) -> None:
    """As DeepSpeed's does by default."""
    story = overflowing(sound("zero1-fp16_mixed-w2"))
    first = {"hysteresis": 2.0}
    second = {"hysteresis": 1.0}
    assert bearing(story, first, second) == []
    for before, after in (({}, {}), (first, first), (second, second), (second, first)):
        assert bearing(story, before, after) == SCALE_STAYS


@pytest.mark.parametrize(("action", "nth", "what"), [("overflow", 0, "the overflow"), ("step", 1, "the step after it")])
def test_scales_that_part(sound: Sound, action: str, nth: int, what: str) -> None:
    story = overflowing(sound("fsdp1-fp16_mixed-w2"))
    story = alter(story, action, {"scaler": {"scale": 256.0}}, nth=nth, rank=1)
    assert story.findings("scaling") == [f"ranks scale the loss differently after {what}: by 256, 512"]


def test_a_scale_that_stays(sound: Sound) -> None:
    story = alter(overflowing(sound(DDP)), "overflow", {"scaler": {"scale": 1024.0}})
    assert story.findings("scaling") == SCALE_STAYS


@pytest.mark.parametrize("cell", CELLS)
def test_a_rank_that_steps_while_the_others_skip(sound: Sound, cell: str) -> None:
    story = overflowing(sound(cell))
    _, last = story.trace.run("overflow").at("step", 1)
    story = alter(story, "overflow", {"model": last.model, "optimizer": last.optimizer}, rank=1)
    skipped, stuck = story.findings("scaling")
    assert skipped.startswith("rank 1: ")
    assert skipped.endswith(" others changed in a step whose gradients overflow; expected it to be skipped")
    assert stuck == "rank 1: nothing changed in the step after the overflow; expected training to go on"


def test_a_master_alone_that_changes(sound: Sound) -> None:
    story = overflowing(sound("zero1-fp16_mixed-w2"))
    story = story.state("exp_avg", {"digest": "another"}, run="overflow", action="overflow", rank=0)
    assert story.findings("scaling") == [
        "rank 0: exp_avg of 'partition 0' changed in a step whose gradients overflow; expected it to be skipped"
    ]


def test_a_silent_rank(sound: Sound) -> None:
    story = overflowing(sound(DDP)).without("overflow", run="overflow", rank=1)
    assert "rank 1: no report after the step that overflows" in story.findings("scaling")


@pytest.mark.parametrize(
    ("cell", "driver", "reason"),
    [
        ("ddp-bf16_upcast-w2", TorchDriver, "bf16_upcast needs no scaled loss"),
        ("ddp-fp16_mixed-w2-compile", TorchDriver, "a hook that makes gradients overflow would break the graph"),
        ("ddp-fp16_mixed-w2", Driver, r"the driver has no overflow(): no gradients can be made to"),
        ("ddp-fp16_mixed-w2", TorchDriver, ""),
    ],
)
def test_cells_to_which_it_does_not_apply(sound: Sound, cell: str, driver: type[Driver], reason: str) -> None:
    actual_reason = CHECKS.get("scaling").not_applicable(sound(cell).cell, driver)
    assert (actual_reason or "").startswith(reason)
    assert bool(actual_reason) == bool(reason)
