"""A script of transformers.Trainer: what the checks say of it, and whether it goes on where it was stopped."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from pytest_distcompat.ext.scripts import RoundTrip
from pytest_distcompat.ext.scripts.launching import Host
from pytest_distcompat.failures import Incompatible

from .conftest import Launch, trip

pytestmark = [pytest.mark.spawn, pytest.mark.nightly]

CHECKS = ("active", "names", "optimizer", "dtypes", "memory", "units")


@pytest.fixture(
    scope="module", params=[*(pytest.param(name, marks=pytest.mark.nightly) for name in ("ddp", "zero2")), "fsdp2"]
)
def gone_on(request: pytest.FixtureRequest, module_host: Host) -> RoundTrip:
    return trip(module_host, "trainer_script.py", launcher="accelerate", strategy=request.param)


def test_a_sound_script_resumes(gone_on: RoundTrip) -> None:
    assert not gone_on.findings


def test_a_sound_script_passes_every_check(gone_on: RoundTrip) -> None:
    gone_on.through.check(*CHECKS)


def test_on_the_cpu_the_report_says_what_made_it_run(gone_on: RoundTrip) -> None:
    """transformers alone would refuse FSDP there."""
    assert any(label.startswith("CPU bridge: accelerate") for label in gone_on.through.labels)


def test_the_final_model_of_the_trainer(gone_on: RoundTrip) -> None:
    """(c) as it is today: ``save_model`` under FSDP with a sharded state dict writes nothing, and says nothing."""
    assert gone_on.through.cell is not None
    if gone_on.through.cell.strategy != "fsdp2":
        left = gone_on.through.model_path()
        assert left is not None
        # Its checkpoint lies beside it, and is not what the run was for.
        for output in (left, left.parent):
            dataclasses.replace(gone_on.through, output=output).check("final_model_loadable")
        return
    with pytest.raises(Incompatible, match="final_model_loadable"):
        gone_on.through.check("final_model_loadable")


def test_a_run_that_forgets_to_resume(gone_on: RoundTrip) -> None:
    """(b) as in transformers' own test of it: ``train()`` does not get the checkpoint, and the run is green."""
    forgot = dataclasses.replace(gone_on, resumed=gone_on.through)
    with pytest.raises(Incompatible, match="it started again at step 0"):
        forgot.check()


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", ["fsdp1", "zero3"])
def test_other_strategies(run: Launch, tmp_path: Path, strategy: str) -> None:
    script_run = run(
        "trainer_script.py", "--output", tmp_path, "--save-at", "3", launcher="accelerate", strategy=strategy
    )
    script_run.check(*CHECKS)
    assert any(label.startswith("CPU bridge: accelerate") for label in script_run.labels)
