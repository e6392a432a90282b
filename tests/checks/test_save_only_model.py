"""Check ``save_only_model`` on hand-made traces: missing weights, or more than weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from pytest_distcompat import refuses
from pytest_distcompat.cell import Cell
from pytest_distcompat.checks import CHECKS
from pytest_distcompat.driver import Driver
from pytest_distcompat.judge import judge
from pytest_distcompat.model_values import values
from pytest_distcompat.trace import FileInfo, RunFailure, Trace

if TYPE_CHECKING:
    from tests.checks.traces import Story

RunsOf = Callable[[str, str], "Story"]
CELLS = tuple(f"{name}-fp32-w2-save_only_model" for name in ("ddp", "fsdp1", "fsdp2", "zero1", "zero3"))


def saved(runs_of: RunsOf, cell: str, *, values_of: str = "save", kind: str = "") -> tuple[Story, dict[str, str]]:
    """The story, and what a checkpoint holds of what was trained at that action, or of that kind of values."""
    story = runs_of(cell, "save_only_model")
    run = story.trace.run()
    trained = values(run, run.at(values_of))
    digests_by_name = {**trained.of("parameter"), **trained.of("buffer"), **trained.of(kind or "master")}
    return story, {name: digests[0] for name, digests in digests_by_name.items()}


def findings(story: Story, *files: FileInfo) -> list[str]:
    return story.snapshot("files", {"saved": files}, rank=0).findings("save_only_model")


def model(weights: dict[str, str], path: str = "model.safetensors") -> FileInfo:
    return FileInfo(path, "", "model", tuple(weights), digests=weights)


@pytest.mark.parametrize("cell", CELLS)
def test_sound(runs_of: RunsOf, cell: str) -> None:
    story, weights = saved(runs_of, cell)
    assert findings(story, model(weights)) == []


@pytest.mark.parametrize("cell", CELLS)
def test_a_weight_is_not_saved(runs_of: RunsOf, cell: str) -> None:
    story, weights = saved(runs_of, cell)
    del weights["outlet.weight"], weights["scale"]
    assert findings(story, model(weights)) == ["2 of 4 weights are not saved, first 'outlet.weight', 'scale'"]


@pytest.mark.parametrize("cell", CELLS)
def test_the_weights_are_those_of_before(runs_of: RunsOf, cell: str) -> None:
    # What is not trained has not moved.
    story, weights = saved(runs_of, cell, values_of="build")
    assert findings(story, model(weights)) == [
        "2 of 4 weights have other values in the checkpoint than at the save, first 'inlet.weight', 'outlet.weight'"
    ]


def test_two_files_disagree(runs_of: RunsOf) -> None:
    story, weights = saved(runs_of, CELLS[0])
    assert findings(story, model(weights), model({"outlet.weight": "14:1"}, "second.safetensors")) == [
        "1 of 4 weights have other values in the checkpoint than at the save, first 'outlet.weight'"
    ]


def test_one_of_tied_names_is_enough(runs_of: RunsOf) -> None:
    story, weights = saved(runs_of, CELLS[0])
    weights["head.weight"] = weights.pop("inlet.weight")
    assert findings(story, model(weights)) == []


@pytest.mark.parametrize(("holds", "what"), [("optimizer", "an optimizer"), ("scheduler", "a scheduler")])
def test_more_than_the_model(runs_of: RunsOf, holds: str, what: str) -> None:
    story, weights = saved(runs_of, CELLS[0])
    assert findings(story, model(weights), FileInfo("checkpoint-3/state.pt", "", holds, ("state",))) == [
        f"state of {what} is in 'checkpoint-3/state.pt'; the checkpoint is of the model alone"
    ]


@pytest.mark.parametrize("kind", ["parameter", "master"])
def test_masters_or_the_copies_that_are_computed_with(runs_of: RunsOf, kind: str) -> None:
    # Under ZeRO in bfloat16 the copies are what there is to save.
    story, weights = saved(runs_of, "zero1-fp32-w2-save_only_model", kind=kind)
    assert findings(story, model(weights)) == []


def test_nothing_was_saved(runs_of: RunsOf) -> None:
    story, _ = saved(runs_of, CELLS[0])
    assert findings(story) == ["4 of 4 weights are not saved, first 'inlet.weight', 'frozen.weight', 'outlet.weight'"]


def test_nothing_was_read(runs_of: RunsOf) -> None:
    story, _ = saved(runs_of, CELLS[0])
    assert story.without("files").findings("save_only_model") == ["the saved files were not read"]


def test_a_rank_that_did_not_come_back_from_the_save(runs_of: RunsOf) -> None:
    story, weights = saved(runs_of, CELLS[0])
    assert findings(story.without("save", rank=1), model(weights)) == ["rank 1: no report after save"]


def test_it_applies_to_cells_with_save_only_model() -> None:
    check = CHECKS.get("save_only_model")
    assert check.not_applicable(Cell.of("ddp", "fp32"), Driver) == "the cell saves the optimizer too"
    assert check.not_applicable(Cell.of("ddp", "fp32", save_only_model=True), Driver) is None


@pytest.mark.parametrize(("action", "status"), [("build", "refused"), ("step", "late"), ("save", "late")])
def test_refused_when_built_or_found_out_late(runs_of: RunsOf, action: str, status: str) -> None:
    story = runs_of("fsdp2-fp32-w2-save_only_model", "save_only_model")
    run = story.trace.run()
    index = run.at(action)[0].index
    message = "rank 0 raised ValueError: save_only_model option is not compatible with FSDP state dict type"
    broken = replace(
        run,
        snapshots=tuple(m for m in run.snapshots if m.index < index),
        end=RunFailure("raised", message, message, action, index),
    )
    expect = refuses(save_only_model=True, match=r"save_only_model .* not compatible")
    result = judge(CHECKS.get("save_only_model"), story.cell, Trace.of("hand-made", [broken]), [expect])
    assert result.status == status
