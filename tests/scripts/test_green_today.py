"""Faults that today's harnesses call green: each one is made, passes the usual test, and fails here."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from pytest_distcompat.ext.scripts import RoundTrip, ScriptRun, launch, resume_roundtrip
from pytest_distcompat.ext.scripts.launching import Host
from pytest_distcompat.launch.process import alive

from .conftest import PROGRAMS, pids

pytestmark = pytest.mark.spawn

OFFLINE = PROGRAMS / "offline"
CHECKPOINTING = "accelerate.test_utils.scripts.external_deps.test_checkpointing"


class Checkpointing:
    """accelerate's own checkpoint script, unmodified, on a model and data made on the spot.

    Resumed, it evaluates, compares an accuracy and two learning rates, and ends.
    """

    def __init__(self, host: Host, directory: Path) -> None:
        pytest.importorskip("accelerate")
        self.host, bert = host, str(directory / "bert")
        subprocess.run([sys.executable, str(OFFLINE / "make_bert.py"), bert], check=True)
        self.command = [CHECKPOINTING, "--model_name_or_path", bert]
        self.sound = resume_roundtrip(
            "-m",
            [*self.command, "--output_dir", "{output}", "--partial_train_epoch", "1"],
            resume=["--resume_from_checkpoint", "{checkpoint}"],
            save_at=3,
            total=3,
            same=("parameters", "optimizer", "scheduler"),
            **self.settings(),
        )

    def settings(self, fault: str = "") -> dict[str, Any]:
        environment = {"PYTHONPATH": str(OFFLINE), "FAULT": fault}
        return {"launcher": "accelerate", "strategy": "ddp", "environment": environment, "host": self.host}

    def resumed(self, fault: str) -> RoundTrip:
        """Run the round trip with an accelerate that loads wrongly."""
        saved = Path(self.sound.stopped.saved()[0].path)
        line = ["-m", *self.command, "--output_dir", str(saved.parent), "--resume_from_checkpoint", str(saved)]
        return dataclasses.replace(self.sound, resumed=launch(*line, **self.settings(fault)))


@pytest.fixture(scope="module")
def checkpointing(module_host: Host, tmp_path_factory: pytest.TempPathFactory) -> Checkpointing:
    return Checkpointing(module_host, tmp_path_factory.mktemp("checkpointing"))


@pytest.mark.nightly
def test_accelerates_checkpoint_script_is_sound(checkpointing: Checkpointing) -> None:
    checkpointing.sound.stopped.check("active", "names", "optimizer", "dtypes")
    assert not checkpointing.sound.findings


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        pytest.param("the model is not loaded", ["parameter 'bert.*: other values"], marks=pytest.mark.nightly),
        pytest.param("the moments are zero", ["exp_avg 'bert.*: other values"], marks=pytest.mark.nightly),
        (
            "the moments are in bfloat16",
            ["exp_avg_sq 'bert.*: other values", "exp_avg_sq 'bert.*: bfloat16 instead of float32"],
        ),
    ],
)
def test_a_checkpoint_that_restores_other_values(checkpointing: Checkpointing, fault: str, expected: list[str]) -> None:
    """The script ends with code 0, its comparisons done."""
    trip = checkpointing.resumed(fault)
    assert not trip.resumed.failed
    findings = [
        [finding for finding in trip.findings if re.match(f"{pattern} after the load at 2 ranks", finding)]
        for pattern in expected
    ]
    assert all(findings), trip.findings
    assert sum(map(len, findings)) == len(trip.findings), trip.findings


@pytest.fixture(scope="module")
def todays_way(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """``execute_subprocess_async`` waits beyond its time limit, and calls a killed command a success."""
    pytest.importorskip("accelerate")
    line = [sys.executable, str(PROGRAMS / "todays_way.py"), str(tmp_path_factory.mktemp("today") / "mark")]
    done = subprocess.run(line, check=True, capture_output=True, text=True)
    content: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return content


def test_a_launcher_that_is_killed_has_failed(todays_way: dict[str, Any], host: Host) -> None:
    """``execute_subprocess_async`` asserts that the exit code is not above 0; that of a signal is below."""
    assert todays_way["killed"] == "green"
    kills = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    run = launch(sys.executable, "-c", kills, launcher="cli", host=host, allow_failure=True)
    assert run.ending.headline() == f"the ranks could not be started: {sys.executable} was killed by SIGKILL"


@pytest.fixture(scope="module")
def hung(module_host: Host) -> ScriptRun:
    """One of two ranks under torchrun that never ends."""
    return launch(PROGRAMS / "ends.py", "hang", host=module_host, timeout=15, allow_failure=True)


@pytest.mark.nightly
def test_a_time_limit_ends_the_whole_process_tree(todays_way: dict[str, Any], hung: ScriptRun) -> None:
    """``execute_subprocess_async(timeout=1)`` waits for the whole child, and is green."""
    assert todays_way["outlives"] == "green"
    assert todays_way["waited"]
    assert hung.ending.kind == "hung", hung.text()
    assert hung.ending.headline().startswith("time limit of 15 s")


@pytest.mark.nightly
def test_ranks_of_a_hung_torchrun_do_not_outlive_it(hung: ScriptRun) -> None:
    """SIGKILL, by which a job's own time limit ends torchrun, leaves its ranks alive."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with subprocess.Popen([*torchrun, str(PROGRAMS / "ends.py"), "hang"], stdout=subprocess.PIPE) as job:
        assert job.stdout is not None
        expected = sorted(job.stdout.readline() for _ in range(2))
        below = psutil.Process(job.pid).children(recursive=True)
        # Whatever it said: it would hang for ten minutes.
        job.kill()
    left = [process for process in below if process.is_running() and alive(process.pid)]
    for process in left:
        process.kill()
    assert expected == [b"rank 0 is about to: hang\n", b"rank 1 is about to: hang\n"]
    assert left
    assert len(pids(hung)) == 2
    assert not any(map(alive, pids(hung)))


@pytest.mark.nightly
def test_a_deadlock_of_accelerates_own_script(module_host: Host) -> None:
    """Today its test waits until the job's own time limit, and then says nothing of where. Here: the line of each rank."""
    module = "accelerate.test_utils.scripts.test_distributed_data_loop"
    settings: dict[str, Any] = {"launcher": "accelerate", "strategy": "ddp", "timeout": 45.0, "host": module_host}
    run = launch("-m", module, allow_failure=True, **settings)
    assert run.ending.kind == "hung", run.text()
    assert [end.status for end in run.ending.ranks] == ["stuck", "stuck"]
    for end in run.ending.ranks:
        assert "test_distributed_data_loop.py" in end.stack
    assert not any(map(alive, pids(run)))
