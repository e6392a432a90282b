"""Whoever ends pytest as terminals, schedulers and people do: its ranks end with it, those that wait for a test too."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from itertools import product
from typing import TYPE_CHECKING

import pytest
from tests.faults.conftest import held_leases

from pytest_distcompat.lease import Pool, cpu_slots

if TYPE_CHECKING:
    from tests.faults.conftest import Faulty, Start
    from tests.faults.runs import Run

pytestmark = pytest.mark.spawn

REUSE = "--distcompat-reuse=session"
#: By what the ranks do: arguments of pytest, and what is said in the environment.
HOW: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "alone": ((), {}),
    "workers": (("-n", "2"), {}),
    "reused": ((REUSE,), {}),
    # After one test that passed, before the next one.
    "idle": ((REUSE, "-p", "test_midway"), {"FAULTY_IDLE": "yes"}),
}
#: How long the end may take, in seconds. No time limit is so short, and on a busy machine nothing takes longer.
SOON = 20.0

#: Starts pytest with ranks of that kind, so many, and waits until they are as they should be.
Begin = Callable[..., "Faulty"]


@pytest.fixture
def begin(start: Start) -> Begin:
    def begin(how: str, world_size: int = 2) -> Faulty:
        args, expected = HOW[how]
        faulty = start("faults_midway.py", *args, FAULTY_WORLD_SIZE=str(world_size), **expected)
        faulty.wait_for(*(["idle"] if how == "idle" else [f"busy-{rank}" for rank in range(world_size)]))
        assert held_leases(faulty.temporary), "what is to be given back was lent"
        return faulty

    return begin


def end(faulty: Faulty, number: int, *, group: bool, times: int = 1, pause: float = 0.0) -> Run:
    """Send that signal to pytest or, as a terminal does, to its whole process group; what is left then."""
    began = time.monotonic()
    for again in range(times):
        if again:
            time.sleep(pause)
        if faulty.process.poll() is None:
            os.killpg(faulty.process.pid, number) if group else faulty.process.send_signal(number)
    run = faulty.finish(60, killed=times > 1 or number != signal.SIGINT, grace=SOON)
    assert time.monotonic() - began < SOON, run.out
    return run


def cases(*daily: tuple[object, ...], axes: tuple[tuple[object, ...], ...]) -> list[object]:
    """All combinations, of which those run every day that are named."""
    return [
        pytest.param(*case, id="-".join(map(str, case)), marks=() if case in daily else pytest.mark.nightly)
        for case in product(*axes)
    ]


TO = ("pytest", "group")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("how", "to", "world_size"),
    cases(("alone", "group", 2), ("idle", "group", 2), axes=(tuple(HOW), TO, (2, 4))),
)
def test_ctrl_c(how: str, to: str, world_size: int, begin: Begin) -> None:
    run = end(begin(how, world_size), signal.SIGINT, group=to == "group")
    assert run.code == pytest.ExitCode.INTERRUPTED, run.out
    assert "KeyboardInterrupt" in run.out
    assert not run.leftovers
    # As those of ranks that fail: their peers are elsewhere.
    assert not list(run.directory.glob("torn-down-*"))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("how", "to", "pause"),
    cases(("idle", "group", 0.05), axes=(tuple(HOW), TO, (0.0, 0.05, 0.5))),
)
def test_ctrl_c_twice(how: str, to: str, pause: float, begin: Begin) -> None:
    run = end(begin(how), signal.SIGINT, group=to == "group", times=2, pause=pause)
    # pytest reports the first; the second may come when Python has taken over.
    codes = {pytest.ExitCode.INTERRUPTED, -signal.SIGINT, 128 + signal.SIGINT}
    if "INTERNALERROR> RuntimeError: release unlocked lock" in run.out:
        # xdist waits in a queue of Python, which loses its lock if both come within one wait.
        codes.add(pytest.ExitCode.INTERNAL_ERROR)
    assert run.code in codes, run.out
    assert not run.leftovers


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("how", "to", "world_size", "number"),
    cases(
        ("idle", "pytest", 2, signal.SIGKILL),
        axes=(tuple(HOW), TO, (2, 4), (signal.SIGTERM, signal.SIGKILL)),
    ),
)
def test_signals_that_end(how: str, to: str, world_size: int, number: int, begin: Begin) -> None:
    run = end(begin(how, world_size), number, group=to == "group")
    assert run.code == -number, run.out
    assert not run.leftovers


@pytest.mark.nightly
def test_a_held_slot_would_be_found(start: Start) -> None:
    faulty = start("def test_well():\n    pass\n")
    leases = faulty.temporary / "distcompat-leases-of-a-test"
    with Pool(leases, cpu_slots()).lease(1, who="somebody"):
        run = faulty.finish(grace=0.5)
    assert [name.rpartition(" by ")[2] for name in run.leftovers] == ["somebody"], run.leftovers
    assert not held_leases(faulty.temporary)
