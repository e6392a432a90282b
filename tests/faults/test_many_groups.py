"""Process groups one after another leave nothing behind in the processes that start them, nor on the machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.faults.conftest import private_shared_memory

pytestmark = pytest.mark.spawn

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "many_groups.py"


def test_nothing_grows(environment: dict[str, str]) -> None:
    # Alone in its /dev/shm, where that is allowed: other people's files come and go.
    command = [*private_shared_memory(), sys.executable, str(SCRIPT), "--groups", "50", "--settled", "20"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| file descriptors | " in done.stdout
