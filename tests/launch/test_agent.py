"""SIGTERM, by which the parent ends a run whose ranks are gone, wherever it reaches torchrun's agent."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_distcompat.ext.cluster.place import Place
from pytest_distcompat.ext.cluster.rendezvous import SeveralNodes
from pytest_distcompat.launch import agent
from pytest_distcompat.launch.request import Request
from pytest_distcompat.launch.warm import WarmLauncher

if TYPE_CHECKING:
    from tests.launch.conftest import Run

pytestmark = pytest.mark.spawn


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Without one SIGTERM would end pytest; torch leaves its own behind."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    before = [signal.getsignal(number) for number in numbers]
    signal.signal(signal.SIGTERM, lambda *_: pytest.fail("nobody handles SIGTERM"))
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def nothing(path: str) -> None:
    pass


def sends(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def outcome(directory: Path, **fields: Any) -> dict[str, Any]:
    return agent.run(Request("bodies:meet", {}, 1, str(directory), 30.0, **fields), nothing, "fork", lambda _: None)


def test_once_the_ranks_are_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "sweep_shared_memory", sends)
    assert outcome(tmp_path)["exit_codes"] == [0]


def test_while_the_rendezvous_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end = SeveralNodes.shutdown

    def sends_and_ends(rendezvous: SeveralNodes) -> bool:
        sends()
        return end(rendezvous)

    monkeypatch.setattr(SeveralNodes, "shutdown", sends_and_ends)
    place = Place(0, "127.0.0.1", ("127.0.0.1", 0), "one")
    assert outcome(tmp_path, place=dataclasses.asdict(place))["exit_codes"] == [0]


def test_before_the_first_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "OneAgent", sends)
    assert outcome(tmp_path) == {"exit_codes": [], "first": None, "ended_at": []}


def test_between_two_runs(run: Run, warm: WarmLauncher) -> None:
    run("meet")
    process = warm._process
    assert process is not None
    process.stop_agent()
    assert run("meet").kind == "ok"
    assert warm._process is process
