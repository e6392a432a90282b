"""Stopped and resumed: scripts that go on as if nothing had happened, and scripts that only seem to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pytest_distcompat.failures import Incompatible, UsageProblem
from pytest_distcompat.scripts import RoundTrip, resume_roundtrip
from pytest_distcompat.scripts.launching import Host

from .conftest import PROGRAMS

Trip = Callable[..., RoundTrip]
ARGUMENTS = ("--output", "{output}", "--steps", "{steps}", "--save-at", "{save_at}")


@pytest.fixture
def trip(host: Host) -> Trip:
    """Five steps, saved after three."""

    def trip(program: str, *more: str, **settings: Any) -> RoundTrip:
        return resume_roundtrip(
            PROGRAMS / program,
            [*ARGUMENTS, *more],
            resume=["--resume", "{checkpoint}", *(("--saved-by", "2") if "reshard_to" in settings else ())],
            **{"save_at": 3, "total": 5, "host": host, **settings},
        )

    return trip


@pytest.mark.spawn
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_a_plain_loop_goes_on(trip: Trip, strategy: str) -> None:
    found = trip("torch_loop.py", "--strategy", strategy, strategy=strategy)
    assert not found.findings
    assert [len(run.life.at("load")) for run in (found.through, found.stopped, found.resumed)] == [0, 0, 2]


@pytest.mark.spawn
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "zero2"])
def test_a_trainer_script_goes_on(trip: Trip, strategy: str) -> None:
    assert not trip("trainer_script.py", launcher="accelerate", strategy=strategy).findings


@pytest.mark.spawn
def test_more_ranks_go_on_with_what_fewer_saved(trip: Trip) -> None:
    found = trip(
        "torch_loop.py", "--strategy", "fsdp2", strategy="fsdp2", reshard_to=3, same=["parameters", "optimizer"]
    )
    assert not found.findings
    assert found.resumed.life.world_size == 3


@pytest.mark.spawn
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (
            "from step 0",
            "the resumed run took 5 steps, all of them: it started again at step 0; expected it to start at step 4",
        ),
        (
            "moments are zero",
            r"rank 0: optimizer: \d+ of \d+ values differ, first 'exp_avg of .* in step 4, 1 after the load",
        ),
    ],
)
def test_a_run_that_only_seems_to_go_on(trip: Trip, fault: str, said: str) -> None:
    """(b) and (e): both end well, with losses that look right."""
    with pytest.raises(Incompatible, match=said):
        trip("torch_loop.py", "--strategy", "fsdp2", "--fault", fault, strategy="fsdp2")


@pytest.mark.spawn
def test_a_run_that_forgets_to_resume(host: Host) -> None:
    """(b): the argument never reaches ``train()``, as in transformers' own test of it."""
    with pytest.raises(Incompatible, match="it started again at step 0"):
        resume_roundtrip(PROGRAMS / "torch_loop.py", ARGUMENTS, resume=[], save_at=3, total=5, host=host)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"same": ["momenta"]}, r"same=\['momenta'\]: known are losses, grad_norms"),
        ({"save_at": 5}, "save_at=5 of total=5 steps"),
        ({"save_at": 0}, "save_at=0 of total=5 steps"),
    ],
)
def test_wrong_words(trip: Trip, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageProblem, match=said):
        trip("torch_loop.py", **settings)
