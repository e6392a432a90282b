"""What executors read of their schedulers; the schedulers themselves: tests/machines."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pytest_distcompat.ext.cluster.executors.slurm import Slurm


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        ("JobId=7 JobState=RUNNING Reason=None PreemptEligibleTime=2026-11-26T10:39:52 PreemptTime=None", ""),
        ("JobId=7 JobState=RUNNING Reason=None PreemptTime=2026-11-26T10:39:57", "Slurm preempts job 7"),
        ("JobId=7 JobState=COMPLETING Reason=None PreemptTime=2026-11-26T10:40:19", "Slurm preempts job 7"),
        ("JobId=7 JobState=COMPLETING Reason=None Restarts=1", "Slurm ends job 7 (COMPLETING)"),
        ("JobId=7 JobState=TIMEOUT Reason=TimeLimit Restarts=0", "Slurm ends job 7 (TIMEOUT)"),
        ("", ""),
    ],
)
def test_why_slurm_takes_nodes_away(shown: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f'#!/bin/sh\n[ "$*" = "--oneliner show job 7" ] && echo "{shown}"\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert Slurm().taken() == expected


def test_without_the_extension_a_test_over_nodes_is_a_usage_error(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        "import pytest\n\n@pytest.mark.distcompat(world_size=2, nodes=2)\ndef test_over_nodes(): raise AssertionError\n"
    )
    result = pytester.runpytest_subprocess("-p", "no:distcompat-cluster", "--distcompat-gpus=0")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*tests over several nodes need the plugin distcompat-cluster"])
