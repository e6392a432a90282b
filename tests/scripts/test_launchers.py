"""Ranks that nobody of ours started: by torch.multiprocessing, by DeepSpeed's own command."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from pytest_distcompat.ext.scripts import launch
from pytest_distcompat.ext.scripts.launching import Host
from pytest_distcompat.failures import RunFailedError

from .conftest import PROGRAMS

pytestmark = [pytest.mark.spawn, pytest.mark.nightly]


@pytest.fixture
def port() -> str:
    """One that was free a moment ago: these launchers take no other."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


@pytest.mark.nightly
@pytest.mark.parametrize("start", ["spawn", pytest.param("fork", marks=pytest.mark.nightly)])
def test_torch_multiprocessing(
    host: Host, port: str, start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # torch leaves a file for each exception there.
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    line = [str(PROGRAMS / "spawned.py"), start]
    launch(sys.executable, *line, "well", port, launcher="cli", strategy="ddp", host=host).check("active", "optimizer")
    with pytest.raises(RunFailedError, match="rank 1 raised ValueError: in a rank that was made"):
        launch(sys.executable, *line, "raise", port, launcher="cli", host=host)


@pytest.mark.nightly
def test_the_command_of_deepspeed(host: Host, port: str) -> None:
    pytest.importorskip("deepspeed")
    line = ["--num_gpus", "2", "--master_port", port, str(PROGRAMS / "deepspeed_loop.py")]
    launch("deepspeed", *line, launcher="cli", strategy="zero2", host=host).check("active", "optimizer", "dtypes")


def test_a_module_by_accelerate(host: Host) -> None:
    """One of accelerate's own, as it is installed."""
    launch("-m", "accelerate.test_utils.scripts.test_ops", launcher="accelerate", strategy="ddp", host=host)
