"""Check ``paths`` on hand-made traces: state that is lost in a directory with an unusual name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks import CHECKS
from pytest_distcompat.drivers.torch import TorchDriver
from pytest_distcompat.scenario import BLOCKED_RUN, NAMED_RUN, PATHS
from pytest_distcompat.trace import RunFailure

if TYPE_CHECKING:
    from tests.checks.traces import Story

RunsOf = Callable[[str, str], "Story"]
WHEN = f"after the load from {NAMED_RUN.directory!r}"


@pytest.mark.parametrize("cell", ["ddp-fp32-w2", "fsdp1-fp32-w2", "fsdp2-fp32-w4", "zero1-fp32-w2", "zero3-fp32-w2"])
def test_sound(runs_of: RunsOf, cell: str) -> None:
    assert runs_of(cell, "paths").findings("paths") == []


def test_the_name_is_hostile() -> None:
    for part in (" ", "/", "pytorch_model_fsdp", "optimizer"):
        assert part in NAMED_RUN.directory
    assert not NAMED_RUN.directory.isascii()
    assert [run.directory for run in PATHS.runs] == [NAMED_RUN.directory, NAMED_RUN.directory, BLOCKED_RUN.directory]


BLOCKED = "a file is where the checkpoint's directory 'blocked here' should be: "


def test_a_save_that_fails_in_silence(runs_of: RunsOf) -> None:
    story = ending(runs_of("ddp-fp32-w2", "paths"), "blocked", None)
    assert story.findings("paths") == [f"{BLOCKED}nothing was raised in the save, and training went on"]


def test_a_save_of_one_rank_raises_while_the_others_go_on(runs_of: RunsOf) -> None:
    end = RunFailure("raised", "", "Error: 'blocked here'", "save", 4)
    story = ending(runs_of("ddp-fp32-w2", "paths"), "blocked", end)
    run = story.trace.run("blocked")
    saved = replace(run.at("step")[1], action="save", index=4)
    runs = {**story.trace.runs, "blocked": replace(run, snapshots=(*run.snapshots, saved))}
    changed = replace(story, trace=replace(story.trace, runs=runs))
    assert changed.findings("paths") == []


def test_an_error_of_the_save_does_not_name_the_directory(runs_of: RunsOf) -> None:
    source = 'rank 0 raised OSError: disk\n  File "x.py", line 3, in save\n    open("blocked here")\nOSError: disk'
    story = ending(runs_of("ddp-fp32-w2", "paths"), "blocked", RunFailure("raised", "OSError: disk", source, "save", 4))
    assert story.findings("paths") == [f"{BLOCKED}the error does not name it: OSError: disk"]


def test_a_trainer_that_knows_the_directory_refuses_it_before_training(runs_of: RunsOf) -> None:
    story = ending(
        runs_of("ddp-fp32-w2", "paths"), "blocked", RunFailure("raised", "", "Error: 'blocked here'", "build", 2)
    )
    assert story.findings("paths") == []
    built = ending(story.without("step", run="blocked"), "blocked", None)
    assert built.findings("paths") == [
        f"{BLOCKED}the trainer was built without an error, although it knows then where to save"
    ]


def ending(story: Story, run: str, end: RunFailure | None) -> Story:
    """Return the story with another end of one run."""
    runs = {**story.trace.runs, run: replace(story.trace.run(run), end=end)}
    return replace(story, trace=replace(story.trace, runs=runs))


@pytest.mark.parametrize("cell", ["ddp-fp32-w2", "fsdp2-fp32-w2", "zero3-fp32-w2"])
def test_weights_that_did_not_come_back(runs_of: RunsOf, cell: str) -> None:
    story = runs_of(cell, "paths").parameters({"digest": "1:1"}, run="reopened", action="load")
    assert story.findings("paths") == [f"parameter 'frozen.weight' and 2 others: other values {WHEN}"]


def test_an_optimizer_that_did_not_come_back(runs_of: RunsOf) -> None:
    story = runs_of("fsdp2-fp32-w2", "paths").optimizer({"states": ()}, run="reopened", action="load")
    assert story.findings("paths") == [f"the optimizer's state is empty {WHEN}"]


def test_a_scheduler_that_did_not_come_back(runs_of: RunsOf) -> None:
    story = runs_of("fsdp2-fp32-w2", "paths").snapshot("load", {"scheduler": "none"}, run="reopened", rank=1)
    assert story.findings("paths") == [f"rank 1: scheduler is at 'none' {WHEN}; saved at 'last_epoch=1'"]


def test_flat_parameters_have_no_names(runs_of: RunsOf) -> None:
    story = runs_of("fsdp1-fp32-w2", "paths").parameters({"kind": "FlatParameter", "digest": "9:9"}, run="named")
    assert story.findings("paths") == []


@pytest.mark.parametrize("check", ["paths", "damage"])
@pytest.mark.parametrize(
    ("cell", "applies"),
    [
        ("fsdp2-fp32-w2", True),
        ("fsdp2-fp32-w2-model_mlp-state_dict_full", True),
        ("fsdp2-bf16_upcast-w2", False),
        ("fsdp2-fp32-w2-compile", False),
    ],
)
def test_cells_to_which_it_applies(check: str, cell: str, *, applies: bool) -> None:
    assert bool(CHECKS.get(check).not_applicable(Cell.parse(cell), TorchDriver)) is not applies
