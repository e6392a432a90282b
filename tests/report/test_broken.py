"""Broken trainers with dozens of red verdicts: each cause of them is shown once."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_distcompat.report.causes import causes
from pytest_distcompat.report.document import Report

BROKEN = Path(__file__).with_name("broken")


@pytest.mark.nightly
@pytest.mark.spawn
def test_each_cause_is_shown_once_and_the_root_cause_first(tmp_path: Path) -> None:
    for file in BROKEN.glob("*.py"):
        shutil.copy(file, tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    options = ["--distcompat-gpus=0", "--distcompat-timeout=10", "--distcompat-report=out.json", "-n", "2", "-rN"]
    options += ["-k", "StaleOptimizer or FailsToLoad or Killed and ddp"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "broken_suite.py", "-p", "no:randomly", "-p", "no:cacheprovider", *options],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    report = Report.read(tmp_path / "out.json")
    grouped = causes(report.results)
    assert sum(len(cause.results) for cause in grouped) >= 30
    failures = done.stdout.partition("= FAILURES =")[2].partition("= distributed compatibility =")[0]
    assert len([line for line in failures.splitlines() if line.startswith("___")]) == len(grouped)
    headlines = [cause.headline for cause in grouped]
    stale = next(number for number, text in enumerate(headlines, 1) if text.endswith("(stale)"))
    (followed,) = [cause for cause in grouped if "KeyError: 0" in cause.headline]
    assert followed.follows == stale
    assert failures.index("(stale)") < failures.index("KeyError: 0")
    # Both ranks fail to load in one line, whose traceback begins at the trainer.
    (load,) = [cause for cause in grouped if "no checkpoint.index" in cause.headline]
    assert {result.suite for result in load.results} == {"TestFailsToLoad"}
    assert failures.count("--- ranks 0 and 1: raised FileNotFoundError: ") == 1
    assert "pytest_distcompat/worker.py" not in failures
