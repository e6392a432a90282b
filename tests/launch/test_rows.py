"""Loaders and metrics of the built-in drivers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.spawn

PROGRAM = """
from pytest_distcompat.cell import Cell
from pytest_distcompat.drivers import find_driver
from pytest_distcompat.world import World

print(sorted(find_driver("trainer")(Cell.parse("ddp-fp32-w1"), World(0, 1, 0, "cpu")).metrics(5)))
"""


@pytest.mark.nightly
def test_an_evaluation_leaves_nothing_in_the_working_directory(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "shuffle: loss" in done.stdout
    assert list(tmp_path.iterdir()) == []
