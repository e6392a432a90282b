"""Scripts on two CPU ranks; and after each run the proof that nothing of it is left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pytest_distcompat.events import Start, of_kind
from pytest_distcompat.ext.scripts import RoundTrip, ScriptRun, launch, resume_roundtrip
from pytest_distcompat.ext.scripts.launching import Host
from pytest_distcompat.launch.process import alive
from pytest_distcompat.lease import Pool, cpu_slots

PROGRAMS = Path(__file__).parent / "programs"

Launch = Callable[..., ScriptRun]


def pids(run: ScriptRun) -> list[int]:
    """Of the processes that announced themselves as ranks."""
    return [start.pid for events in run.ending.events.values() for start in of_kind(Start, events)]


def trip(host: Host, program: str, *more: str, **settings: Any) -> RoundTrip:
    """Five steps of a program of ours, saved after three, and on from there."""
    return resume_roundtrip(
        PROGRAMS / program,
        ["--output", "{output}", "--steps", "{steps}", "--save-at", "{save_at}", *more],
        resume=["--resume", "{checkpoint}"],
        **{"save_at": 3, "total": 5, "host": host, **settings},
    )


@pytest.fixture(scope="package", autouse=True)
def offline() -> Iterator[None]:
    """No network, and no long wait for a name server: torch looks up the name of each address that connects."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("RES_OPTIONS", "timeout:1 attempts:1")
        patch.delenv("PYTEST_ADDOPTS", raising=False)
        yield


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """Two ranks on the CPU."""
    return Host("cpu", 2, Pool(None, cpu_slots()), timeout=120.0, directory=tmp_path / "runs")


@pytest.fixture(scope="module")
def module_host(tmp_path_factory: pytest.TempPathFactory) -> Host:
    """Launch a program once for all tests of a module."""
    return Host("cpu", 2, Pool(None, cpu_slots()), timeout=120.0, directory=tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def run(module_host: Host, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launch]:
    """Launch a program of ours; failures are results. Who asks for the same again gets the same run.

    ``{output}`` in an argument stands for a directory of that run's own.
    """
    runs: dict[str, ScriptRun] = {}

    def run(program: str, *args: Any, **settings: Any) -> ScriptRun:
        key = repr((program, args, sorted(settings.items())))
        if key not in runs:
            output = str(tmp_path_factory.mktemp("output"))
            command = [str(arg).replace("{output}", output) for arg in args]
            if "output" in settings:
                settings["output"] = str(settings["output"]).replace("{output}", output)
            runs[key] = launch(PROGRAMS / program, *command, host=module_host, allow_failure=True, **settings)
        return runs[key]

    yield run
    left = [pid for run in runs.values() for pid in pids(run) if alive(pid)]
    assert not left, f"left running: {left}"
