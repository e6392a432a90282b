"""Process groups one after another leave nothing behind in the processes that start them, nor on the machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.faults.conftest import private_shared_memory

pytestmark = pytest.mark.spawn

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "many_groups.py"


NIGHTLY = pytest.mark.nightly


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("groups", "more"),
    [
        ("60", []),
        pytest.param("200", [], marks=NIGHTLY),
        ("60", ["--reuse"]),
        pytest.param("200", ["--reuse"], marks=NIGHTLY),
    ],
    ids=["60", "200", "60 on the same ranks", "200 on the same ranks"],
)
def test_memory_and_descriptors_do_not_grow_with_groups(
    groups: str, more: list[str], environment: dict[str, str]
) -> None:
    # Alone in its /dev/shm, where that is allowed: other people's files come and go.
    command = [*private_shared_memory(), sys.executable, str(SCRIPT), "--groups", groups, "--settled", "20", *more]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for row in ("file descriptors", "listening sockets", "connections", "ports of stores in TIME_WAIT"):
        assert f"| {row} | " in done.stdout
