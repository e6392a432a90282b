"""Check ``stages`` on hand-made traces: the first stage that breaks is named."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks import CHECKS
from pytest_distcompat.drivers.accelerate import AccelerateDriver
from pytest_distcompat.drivers.deepspeed import DeepSpeedDriver
from pytest_distcompat.scenario import STAGES
from pytest_distcompat.trace import RunFailure, Trace

if TYPE_CHECKING:
    from tests.checks.traces import Sound, Story

CELL = "zero2-fp8-w2"


def staged(sound: Sound, cell: str = CELL) -> Story:
    """The three stages, in which nothing is wrong."""
    story = sound(cell)
    runs = [replace(sound(run.cell(story.cell).id).trace.run(), name=run.name) for run in STAGES.runs]
    return replace(story, trace=Trace.of("made", runs))


def test_all_stages_run_as_asked(sound: Sound) -> None:
    assert staged(sound).findings("stages") == []


@pytest.mark.parametrize(("run", "stage"), [("fp8_alone", "fp8 alone"), ("train", "both")])
def test_nothing_is_converted(sound: Sound, run: str, stage: str) -> None:
    story = staged(sound).model({"float8": 0}, run=run, action="step", nth=2)
    expected = [
        f"{stage}: rank {rank}: 0 of 3 linear layers are in 8 bits after three steps; expected all but the first and the last"
        for rank in (0, 1)
    ]
    assert story.findings("stages") == expected


def test_another_stage_of_zero_runs(sound: Sound) -> None:
    story = staged(sound).model({"zero_stage": 1}, run="zero_alone", action="build")
    findings = story.findings("stages")
    assert findings
    for text in findings:
        assert text.startswith("zero alone: rank ")
        assert "ZeRO stage 1 is running; expected 2" in text


def test_a_stage_breaks_off(sound: Sound) -> None:
    story = staged(sound)
    end = RunFailure("raised", "rank 0 raised RuntimeError: Couldn't swap Float8Linear.weight", "", "build", 1)
    runs = {**story.trace.runs, "train": replace(story.trace.run(), end=end)}
    changed = replace(story, trace=replace(story.trace, runs=runs))
    assert changed.findings("stages") == [f"both: {end.message}"]


def test_cells_to_which_it_does_not_apply() -> None:
    check = CHECKS.get("stages")
    assert check.not_applicable(Cell("fsdp2", "fp8"), AccelerateDriver) == "8 bits and DeepSpeed are not used together"
    assert "a stage alone cannot run" in (check.not_applicable(Cell("zero2", "fp8"), DeepSpeedDriver) or "")
    assert check.not_applicable(Cell("zero2", "fp8"), AccelerateDriver) is None
