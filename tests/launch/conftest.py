"""Real runs of a few ranks on gloo, and after each of them the proof that nothing of it is left."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import pytest

from pytest_distcompat.events import Note, pids_of
from pytest_distcompat.launch.forensics.ending import Ending
from pytest_distcompat.launch.launcher import Launcher
from pytest_distcompat.launch.process import alive
from pytest_distcompat.launch.request import Request, Warmth
from pytest_distcompat.launch.torchrun import TorchrunLauncher
from pytest_distcompat.launch.warm import WarmLauncher

HERE = Path(__file__).parent


class Run(Protocol):
    """Runs ``bodies:<body>`` on every rank of a new run; ``payload`` is what the body gets."""

    def __call__(
        self,
        body: str,
        world_size: int = 2,
        *,
        launcher: Launcher | None = None,
        timeout: float = 60.0,
        collected: str = "",
        turn: int | None = None,
        **payload: Any,
    ) -> Ending: ...


@pytest.fixture
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks, and whatever else these tests start, can import ``bodies``, and do not wait long for a name server."""
    before = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", f"{HERE}{os.pathsep}{before}" if before else str(HERE))
    # torch looks up the name of each address that connects. https://man7.org/linux/man-pages/man5/resolv.conf.5.html
    monkeypatch.setenv("RES_OPTIONS", "timeout:1 attempts:1")


@pytest.fixture(scope="session")
def warm() -> Iterator[WarmLauncher]:
    """One warm launcher for all tests that do not need one of their own. It starts with the first run."""
    launcher = WarmLauncher(Warmth(modules=("torch", "torch.distributed")))
    yield launcher
    launcher.close()


@pytest.fixture
def torchrun() -> Iterator[TorchrunLauncher]:
    """The cross-check."""
    launcher = TorchrunLauncher(Warmth())
    yield launcher
    launcher.close()


@pytest.fixture
def run(tmp_path: Path, warm: WarmLauncher, importable: None) -> Run:
    """See ``Run``."""
    numbers = itertools.count()

    def run(
        body: str,
        world_size: int = 2,
        *,
        launcher: Launcher | None = None,
        timeout: float = 60.0,
        collected: str = "",
        turn: int | None = None,
        **payload: Any,
    ) -> Ending:
        launcher = launcher or warm
        directory = tmp_path / f"run-{next(numbers)}"
        request = Request(
            f"bodies:{body}", payload, world_size, str(directory), timeout, collected=collected, turn=turn
        )
        ending = launcher.run(request)
        children = [int(child["pid"]) for child in notes(ending, "child")]
        left = wait_until_gone([*pids_of(ending.events).values(), *children])
        assert not left, f"left running by the run: {left}\n{ending.text()}"
        if isinstance(launcher, WarmLauncher) and launcher._process is not None:
            assert not launcher._process.strays()
        return ending

    return run


def notes(ending: Ending, event: str) -> list[Mapping[str, Any]]:
    """Return the fields of the events of that name that the test's body logged on all ranks."""
    logged = [event for events in ending.events.values() for event in events]
    return [note.data for note in logged if isinstance(note, Note) and note.event == event]


def wait_until_gone(pids: Iterable[int], seconds: float = 10.0) -> list[int]:
    """Those of the processes that still run when the time is over."""
    left = list(pids)
    deadline = time.monotonic() + seconds
    while (left := [pid for pid in left if alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left
