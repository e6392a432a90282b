"""A loss scale that begins too large, as torch's does for any model on a GPU, is no bug of the trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_distcompat.cell import Cell
from pytest_distcompat.scenario import RESUME, SAVED

from .test_twins import run, verdict

if TYPE_CHECKING:
    from pytest_distcompat.runner import Runner

pytestmark = pytest.mark.spawn

CELL = Cell.parse("fsdp2-fp16_mixed-w2-model_mlp")
DRIVER = "twins.twins_first_scale:BeginsTooLarge"


@pytest.mark.nightly
@pytest.mark.parametrize("check", ["parity", "clipping", "gradients", "resume", "data", "observers", "scaling"])
def test_a_first_scale_that_overflows_is_lowered(runner: Runner, check: str) -> None:
    assert verdict(runner, DRIVER, CELL, check) == ("passed", "")


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["AccelerateBeginsTooLarge", "TrainerBeginsTooLarge"])
@pytest.mark.parametrize("check", ["parity", "clipping", "gradients", "scaling"])
def test_the_first_scale_of_accelerate(runner: Runner, check: str, name: str) -> None:
    assert verdict(runner, f"twins.twins_first_scale:{name}", CELL, check) == ("passed", "")


@pytest.mark.nightly
def test_a_run_that_loads_begins_at_the_trainers_own_scale(runner: Runner) -> None:
    """Otherwise a load that brings no scale would find the saved one."""
    trace = run(runner, DRIVER, CELL, RESUME)
    built = {snapshot.scaler["scale"] for snapshot in trace.run("resume").at("build")}
    saved = {snapshot.scaler["scale"] for snapshot in trace.run("train").at("step", SAVED - 1)}
    assert (built, saved) == ({2.0**24}, {2.0**10})
