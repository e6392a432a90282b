"""Scripts on two CPU ranks; and after each run the proof that nothing of it is left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pytest_distcompat.launch.process import alive
from pytest_distcompat.lease import Pool, cpu_slots
from pytest_distcompat.scripts import ScriptRun, launch
from pytest_distcompat.scripts.launching import Host

PROGRAMS = Path(__file__).parent / "programs"

Launch = Callable[..., ScriptRun]


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No network, and no long wait for a name server: torch looks up the name of each address that connects."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("RES_OPTIONS", "timeout:1 attempts:1")
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """Two ranks on the CPU."""
    return Host("cpu", 2, Pool(None, cpu_slots()), timeout=120.0, directory=tmp_path / "runs")


@pytest.fixture
def run(host: Host) -> Iterator[Launch]:
    """Launch a program of ours; failures are results."""
    runs: list[ScriptRun] = []

    def run(program: str, *args: Any, **settings: Any) -> ScriptRun:
        found = launch(PROGRAMS / program, *args, host=host, allow_failure=True, **settings)
        runs.append(found)
        return found

    yield run
    said = [event for one in runs for events in one.ending.events.values() for event in events]
    left = [event["pid"] for event in said if event["event"] == "start" and alive(int(event["pid"]))]
    assert not left, f"left running: {left}"
