"""Check ``data`` on hand-made traces: ranks get equal batches, or a resumed run other ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_distcompat.checks import CHECKS
from pytest_distcompat.driver import Driver

if TYPE_CHECKING:
    from tests.checks.traces import Sound

CELLS = ("ddp-fp32-w2", "fsdp2-bf16_upcast-w2", "zero3-fp32-w2")


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("nth", [0, 4])
def test_the_same_data_on_two_ranks(sound: Sound, cell: str, nth: int) -> None:
    story = sound(cell).snapshot("step", {"inputs": (f"batch {nth + 1}.0 of rank 0",)}, nth=nth)
    if nth > 2:
        story = story.snapshot("step", {"inputs": (f"batch {nth + 1}.0 of rank 0",)}, run="resume", nth=nth - 3)
    assert story.findings("data") == [f"ranks 0 and 1 are fed the same batch in step {nth + 1}"]


def test_one_of_several_micro_batches(sound: Sound) -> None:
    inputs = ("batch 2.0 of rank 3", "batch 2.0 of rank 1")
    story = sound("ddp-fp32-w4-grad_accum_2").snapshot("step", {"inputs": inputs}, nth=1, rank=3)
    assert story.findings("data") == ["ranks 1 and 3 are fed the same batch in step 2"]


def test_a_later_step_may_have_what_an_earlier_one_had(sound: Sound) -> None:
    # Another epoch, or a data set with doubles.
    story = sound("ddp-fp32-w2").snapshot("step", {"inputs": ("batch 1.0 of rank 0",)}, nth=1, rank=1)
    assert story.findings("data") == []


def test_nothing_was_fed(sound: Sound) -> None:
    story = sound("ddp-fp32-w2").snapshot("step", {"inputs": ()}, nth=1, rank=1)
    assert story.findings("data") == ["rank 1: the model was fed nothing in step 2"]


@pytest.mark.parametrize("cell", CELLS)
def test_random_numbers_begin_anew(sound: Sound, cell: str) -> None:
    story = sound(cell).snapshot("load", {"rng": "seeded"}, run="resume", rank=1)
    assert story.findings("data") == ["rank 1: torch's random state after the load is another than at the save"]


@pytest.mark.parametrize("cell", CELLS)
def test_the_epoch_begins_anew(sound: Sound, cell: str) -> None:
    story = sound(cell)
    for nth in (0, 1):
        for rank in (0, 1):
            changes = {"inputs": (f"batch {nth + 1}.0 of rank {rank}",)}
            story = story.snapshot("step", changes, run="resume", nth=nth, rank=rank)
    what = "is fed other data than in the run that never stopped"
    assert story.findings("data") == [
        f"rank 0: step 1 after the load {what}",
        f"rank 1: step 1 after the load {what}",
        f"rank 0: step 2 after the load {what}",
        f"rank 1: step 2 after the load {what}",
    ]


def test_micro_batches_in_another_order(sound: Sound) -> None:
    inputs = ("batch 4.1 of rank 0", "batch 4.0 of rank 0")
    story = sound("fsdp1-fp32-w2-grad_accum_2").snapshot("step", {"inputs": inputs}, run="resume", nth=0, rank=0)
    assert story.findings("data") == [
        "rank 0: step 1 after the load is fed other data than in the run that never stopped"
    ]


@pytest.mark.parametrize(
    ("run", "action", "nth", "message"),
    [
        ("resume", "load", 0, "load"),
        ("train", "step", 3, "step 1 after the save"),
        ("resume", "step", 1, "step 2 after the load"),
    ],
)
def test_a_silent_rank_is_reported_and_the_others_are_compared(
    sound: Sound, run: str, action: str, nth: int, message: str
) -> None:
    story = sound("ddp-fp32-w4").without(action, run=run, nth=nth, rank=1)
    assert story.findings("data") == [f"rank 1: no report after {message}"]


@pytest.mark.parametrize(
    ("cell", "reason"),
    [
        ("ddp-fp32-w2-compile", "would break the graph"),
        ("fsdp2-fp32-w2-save_only_model", "no optimizer state"),
        ("fsdp2-fp32-w2", ""),
    ],
)
def test_cells_to_which_it_does_not_apply(sound: Sound, cell: str, reason: str) -> None:
    actual_reason = CHECKS.get("data").not_applicable(sound(cell).cell, Driver)
    assert reason in (actual_reason or "")
    assert bool(reason) == bool(actual_reason)
