"""Check ``randomness`` on hand-made traces: ranks draw alike, or a resumed run draws anew."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks import CHECKS
from pytest_distcompat.driver import Driver
from pytest_distcompat.drivers.torch import TorchDriver
from pytest_distcompat.trace import DropoutInfo

if TYPE_CHECKING:
    from tests.checks.traces import Sound, Story


def own(story: Story) -> Story:
    """Each rank has its own random state after each step; the hand-made ones are alike."""
    for rank in range(story.cell.world_size):
        for nth in range(5):
            state = {"rng": f"{nth} of rank {rank}"}
            story = story.snapshot("step", state, run="train", nth=nth, rank=rank)
        # The resumed run repeats the two steps after the save.
        for nth in range(2):
            state = {"rng": f"{nth + 3} of rank {rank}"}
            story = story.snapshot("step", state, run="resume", nth=nth, rank=rank)
    return story


def test_each_rank_draws_its_own(sound: Sound) -> None:
    assert own(sound("ddp-fp32-w2")).findings("randomness") == []


def test_a_model_that_draws_nothing_says_nothing(sound: Sound) -> None:
    story = sound("ddp-fp32-w2").alter(lambda snapshot: snapshot, action="step")
    for run in ("train", "resume"):
        for action in ("step", "save", "load"):
            if story.trace.run(run).at(action):
                story = story.snapshot(action, {"rng": "as it was"}, run=run)
    assert story.findings("randomness") == []


def test_a_loader_draws_the_seed_of_an_epoch(sound: Sound) -> None:
    """On all ranks alike, and once more where a resumed run makes it anew."""
    story = sound("ddp-fp32-w2").snapshot("save", {"rng": "2"})
    story = story.snapshot("load", {"rng": "2"}, run="resume")
    for nth, state in enumerate("11222"):
        story = story.snapshot("step", {"rng": state}, run="train", nth=nth)
    for nth in (0, 1):
        story = story.snapshot("step", {"rng": "3"}, run="resume", nth=nth)
    assert story.findings("randomness") == []


def test_a_model_that_draws_must_draw(sound: Sound) -> None:
    story = own(sound("ddp-fp32-w2"))
    story = replace(story, cell=replace(story.cell, options=(("model", "dropout"),)))
    assert story.findings("randomness") == []
    seeded = story.snapshot("step", {"rng": "seeded"}, run="train", rank=1)
    assert seeded.findings("randomness") == [
        "rank 1: a step draws no random numbers; the model dropout draws some in each forward"
    ]


def test_peers_of_tensor_parallelism_draw_alike(sound: Sound) -> None:
    story = own(sound("fsdp2-fp32-w4-tp_2"))
    for run, number in (("train", 5), ("resume", 2)):
        for nth in range(number):
            step = nth + 3 * (run == "resume")
            story = story.snapshot("step", {"rng": f"{step} of rank 0"}, run=run, nth=nth, rank=1)
    assert story.findings("randomness") == []
    changed = story.snapshot("step", {"rng": "1 of rank 0"}, run="train", nth=1, rank=2)
    assert changed.findings("randomness") == ["ranks 0 and 2 draw the same random numbers in step 2"]


@pytest.mark.parametrize(
    ("cell", "shared"),
    [
        ("fsdp2-fp32-w4-cp_2", "parts of the same sequences (cp 2)"),
        ("fsdp2-fp32-w4-pp_4-pp_schedule_GPipe", "stages of the same pipeline (pp 4)"),
    ],
)
def test_ranks_that_are_fed_the_same_rows_draw_others(sound: Sound, cell: str, shared: str) -> None:
    story = own(sound(cell))
    assert story.findings("randomness") == []
    changed = story.snapshot("step", {"rng": "2 of rank 0"}, nth=2, rank=1)
    assert changed.findings("randomness") == [
        f"ranks 0 and 1 draw the same random numbers in step 3; expected others, as they hold {shared}"
    ]


def dropped(story: Story, rank: int, *pairs: tuple[str, str]) -> Story:
    """Alter what a rank drops in the second step: by what it is given, and where."""
    infos = tuple(DropoutInfo("drop", *pair) for pair in pairs)
    return story.snapshot("step", {"dropouts": infos}, nth=1, rank=rank)


@pytest.mark.parametrize(
    ("of_peer", "finding"),
    [
        ((("x", "here"), ("y", "there")), ""),
        # Of parts of the sequence, or of other activations from there on.
        ((("x of its own", "elsewhere"), ("y of its own", "anywhere")), ""),
        (
            (("x", "elsewhere"), ("y of its own", "anywhere")),
            "ranks 0 and 1 drop others of the same activations in step 2 (drop); expected the same (tp 2)",
        ),
        (
            (("x of its own", "here"), ("y", "there")),
            "ranks 0 and 1 drop the same of different activations in step 2 (drop); expected others (tp 2)",
        ),
    ],
)
def test_peers_of_tensor_parallelism_drop_the_same_of_the_same(
    sound: Sound, of_peer: tuple[tuple[str, str], ...], finding: str
) -> None:
    story = dropped(own(sound("fsdp2-fp32-w4-tp_2")), 0, ("x", "here"), ("y", "there"))
    changed = dropped(story, 1, *of_peer)
    assert changed.findings("randomness") == [finding] * bool(finding)


def test_micro_batches_of_a_rank_drop_others(sound: Sound) -> None:
    story = own(sound("fsdp2-fp32-w4"))
    # Blocks that are computed again drop what they dropped before.
    changed = dropped(story, 1, ("x", "here"), ("y", "there"), ("x", "here"))
    assert changed.findings("randomness") == []
    changed = dropped(story, 1, ("x", "here"), ("y", "here"))
    assert changed.findings("randomness") == ["rank 1 drops the same of different activations in step 2 (drop)"]


def test_two_ranks_draw_alike(sound: Sound) -> None:
    story = own(sound("ddp-fp32-w4")).snapshot("step", {"rng": "2 of rank 1"}, nth=2, rank=3)
    assert story.findings("randomness") == ["ranks 1 and 3 draw the same random numbers in step 3"]


@pytest.mark.parametrize(("action", "nth", "when"), [("load", 0, "the load"), ("step", 0, "step 1 after the load")])
def test_a_resumed_run_draws_anew(sound: Sound, action: str, nth: int, when: str) -> None:
    story = own(sound("fsdp2-fp32-w2")).snapshot(action, {"rng": "seeded"}, run="resume", nth=nth, rank=1)
    assert story.findings("randomness") == [
        f"rank 1: other random numbers follow {when} than in the run that never stopped"
    ]


def test_cells_to_which_it_does_not_apply() -> None:
    check = CHECKS.get("randomness")
    assert check.not_applicable(Cell("ddp", "fp32"), TorchDriver) == "the model llama draws no random numbers"
    assert check.not_applicable(Cell.of("ddp", "fp32", model="dropout"), TorchDriver) is None
    assert check.not_applicable(Cell("ddp", "fp32"), Driver) is None, "of a model of its own nothing is known"


def test_one_rank_is_in_evaluation_mode(sound: Sound) -> None:
    story = own(sound("ddp-fp32-w2")).snapshot("step", {"evaluating": ("", "inlet")}, nth=2, rank=0)
    assert story.findings("randomness") == [
        "rank 1: the whole model is in training mode in step 3; in evaluation mode on rank 0"
    ]
