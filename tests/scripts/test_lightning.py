"""Scripts of Lightning's Trainer: it steps by a closure, and writes its checkpoints through a buffer."""

from __future__ import annotations

import dataclasses

import pytest

from pytest_distcompat.ext.scripts import RoundTrip, launch
from pytest_distcompat.ext.scripts.launching import Host
from pytest_distcompat.failures import Incompatible

from .conftest import PROGRAMS, trip

# Each run is a cold start of Lightning.
pytestmark = [pytest.mark.spawn, pytest.mark.nightly]


@pytest.fixture(scope="module", params=["ddp", "fsdp2"])
def gone_on(request: pytest.FixtureRequest, module_host: Host) -> RoundTrip:
    return trip(module_host, "lightning_fit.py", "--strategy", request.param, strategy=request.param)


def test_the_script_is_probed(gone_on: RoundTrip) -> None:
    run = gone_on.through
    run.check("active", "names", "optimizer", "dtypes", "memory")
    assert [len(losses) for losses in run.losses] == [5, 5]


def test_a_sound_script_resumes(gone_on: RoundTrip) -> None:
    assert not gone_on.findings
    assert [len(run.trace.at("load")) for run in (gone_on.through, gone_on.stopped, gone_on.resumed)] == [0, 0, 2]


def test_batches_that_begin_anew(gone_on: RoundTrip, module_host: Host) -> None:
    """Lightning warns if the loader has no state."""
    cell = gone_on.through.cell
    assert cell is not None
    strategy = cell.strategy
    line = ["--strategy", strategy, "--steps", "5", "--from-the-start", "--resume", gone_on.stopped.saved()[0].path]
    resumed = launch(
        PROGRAMS / "lightning_fit.py",
        "--output",
        gone_on.stopped.saved()[0].path + "-on",
        *line,
        strategy=strategy,
        watch_steps=5,
        host=module_host,
    )
    with pytest.raises(Incompatible, match=r"ranks? (0, )?1: data: fed other data in step 4, 1 after the load"):
        dataclasses.replace(gone_on, resumed=resumed).check()


def test_a_run_that_forgets_its_checkpoint(gone_on: RoundTrip) -> None:
    with pytest.raises(Incompatible, match="it started again at step 0"):
        dataclasses.replace(gone_on, resumed=gone_on.through).check()
