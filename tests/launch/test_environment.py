"""Ranks of the warm launcher see what ranks of a plain ``torchrun`` see, and what their parent changed meanwhile."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from tests.launch.conftest import notes

from pytest_distcompat.launch.forensics.ending import Ending
from pytest_distcompat.launch.process import on_device
from pytest_distcompat.launch.request import Warmth
from pytest_distcompat.launch.warm import WarmLauncher

if TYPE_CHECKING:
    from tests.launch.conftest import Run

pytestmark = pytest.mark.spawn

#: What torch makes of OMP_NUM_THREADS=2: MKL takes no more threads than there are cores.
TWO = {2, min(2, psutil.cpu_count(logical=False) or 2)}

SCRIPT = """
import json, os, pathlib, torch
seen = {"environ": dict(os.environ), "cwd": os.getcwd(), "threads": torch.get_num_threads()}
pathlib.Path(__file__).with_name("rank-" + os.environ["RANK"]).write_text(json.dumps(seen))
"""

#: What torchrun itself gives to ranks; a value that names the very run differs from run to run.
NUMBERS = {"RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK"}
SIZES = {"WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "ROLE_NAME"}
ELASTIC = {f"TORCHELASTIC_{name}" for name in ("RESTART_COUNT", "MAX_RESTARTS", "USE_AGENT_STORE", "SIGNALS_TO_HANDLE")}
NAME_THE_RUN = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"}
GIVEN = {*NUMBERS, *SIZES, *ELASTIC, *NAME_THE_RUN, "TORCH_NCCL_ASYNC_ERROR_HANDLING"}

#: How a launcher keeps ranks of a CPU cell from the GPUs.
CPU = on_device({}, "cpu")


def process_notes(ending: Ending) -> list[dict[str, Any]]:
    assert ending.kind == "ok", ending.text()
    return [dict(seen) for seen in notes(ending, "seen")]


def cold_torchrun(directory: Path, world_size: int) -> list[dict[str, Any]]:
    """Return the environment of ranks of the real torchrun."""
    script = directory / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    environment = {**os.environ, **CPU}
    del environment["PYTEST_CURRENT_TEST"]
    command = [sys.executable, "-m", "torch.distributed.run", "--log-dir", str(directory)]
    command += ["--nproc-per-node", str(world_size), str(script)]
    subprocess.run(command, env=environment, check=True, capture_output=True, timeout=120)
    return [json.loads((directory / f"rank-{rank}").read_text(encoding="utf-8")) for rank in range(world_size)]


@pytest.fixture
def own(importable: None) -> Iterator[WarmLauncher]:
    """A launcher that starts in this test."""
    launcher = WarmLauncher(Warmth())
    yield launcher
    launcher.close()


@pytest.fixture(autouse=True)
def without_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """As most users have it."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_ranks_have_torchruns_environment(run: Run, tmp_path: Path, world_size: int) -> None:
    expected = cold_torchrun(tmp_path, world_size)
    notes = process_notes(run("report_process", world_size))
    assert len(notes) == len(expected) == world_size
    for ours, theirs in zip(notes, expected, strict=True):
        # An older torch does not know this one.
        theirs["environ"].setdefault("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGHUP,SIGQUIT")
        assert set(theirs["environ"]) >= GIVEN
        # Every variable, not only those that torchrun sets.
        assert set(ours["environ"]) == set(theirs["environ"])
        differing = {name for name, value in theirs["environ"].items() if ours["environ"][name] != value}
        assert differing <= NAME_THE_RUN
        addresses = [socket.gethostbyname(each["environ"]["MASTER_ADDR"]) for each in (ours, theirs)]
        assert addresses[0] == addresses[1]
        assert int(ours["environ"]["MASTER_PORT"]) > 0
        assert ours["cwd"] == theirs["cwd"]
        assert ours["threads"] == theirs["threads"]
    assert ("OMP_NUM_THREADS" in notes[0]["environ"]) == (world_size > 1)


def test_no_variable_of_the_launcher_reaches_ranks(run: Run) -> None:
    for each in process_notes(run("report_process")):
        added = set(each["environ"]) - set(os.environ)
        assert added == {*GIVEN, *CPU, "OMP_NUM_THREADS"} - set(os.environ)
        assert "PYTEST_CURRENT_TEST" not in each["environ"]


def test_ranks_get_variables_that_the_parent_changed(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert run("meet").kind == "ok"
    awkward = {"TEST_LINES": "a\nb=c", "TEST_EMPTY": "", "TEST_WORDS": "grüße", "TEST_BYTES": "\udcff"}
    for name, value in awkward.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("HOME")
    # What belongs to the agent stays its own, whatever pytest itself was started by.
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        monkeypatch.setenv(name, "77")
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    monkeypatch.chdir(tmp_path)
    for rank, each in enumerate(process_notes(run("report_process"))):
        assert {name: each["environ"].get(name) for name in awkward} == awkward
        assert "HOME" not in each["environ"]
        assert (each["environ"]["RANK"], each["environ"]["WORLD_SIZE"]) == (str(rank), "2")
        assert each["environ"]["MASTER_PORT"] != "77"
        assert each["environ"]["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
        assert each["cwd"] == str(tmp_path)


@pytest.mark.nightly
def test_ranks_lack_variables_that_the_parent_removed(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, own: WarmLauncher
) -> None:
    with monkeypatch.context() as before:
        before.setenv("TEST_OLD", "1")
        before.setenv("RANK", "77")
        before.setenv("OMP_NUM_THREADS", "2")
        before.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        before.chdir(tmp_path)
        (first,) = process_notes(run("report_process", 1, launcher=own))
    assert first["environ"]["TEST_OLD"] == "1"
    assert first["environ"]["RANK"] == "0"
    assert first["environ"]["OMP_NUM_THREADS"] == "2"
    assert first["environ"]["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert first["threads"] in TWO
    assert first["cwd"] == str(tmp_path)
    (second,) = process_notes(run("report_process", 1, launcher=own))
    assert second["grandparent"] == first["grandparent"]
    assert "TEST_OLD" not in second["environ"]
    assert second["environ"]["RANK"] == "0"
    assert second["environ"]["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "1"
    assert "OMP_NUM_THREADS" not in second["environ"]
    assert second["cwd"] == str(Path.cwd())


def test_threads_follow_the_parent(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [each["threads"] for each in process_notes(run("report_process"))] == [1, 1]
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    notes = process_notes(run("report_process"))
    assert [each["environ"]["OMP_NUM_THREADS"] for each in notes] == ["2", "2"]
    assert all(each["threads"] in TWO for each in notes)
    monkeypatch.delenv("OMP_NUM_THREADS")
    notes = process_notes(run("report_process"))
    assert [each["environ"]["OMP_NUM_THREADS"] for each in notes] == ["1", "1"]
    assert [each["threads"] for each in notes] == [1, 1]
