"""Benchmarks end with a usage error where what they would print is not so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
#: As if a module were not installed.
WITHOUT = """
import runpy, sys
sys.modules[sys.argv[1]] = None
sys.argv = sys.argv[2:]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize(
    ("script", "module"),
    [("faults.py", "expecttest"), ("launch.py", "expecttest"), ("random_order.py", "random_order")],
)
def test_a_missing_package_of_a_benchmark_is_named(script: str, module: str) -> None:
    """The table of faults called torch's own harness wrong, which had not been started."""
    command = [sys.executable, "-c", WITHOUT, module, str(BENCHMARKS / script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2, done.stdout + done.stderr
    assert f"{module} is not installed: pip install --group bench" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["faults.py", "raise"], "no 'raise'; expected some of: raises, "),
        (["upstream_bugs.py", "acc-3904"], "no 'acc-3904'; expected some of: acc-1755-fsdp1-optim-args, "),
        (["warm_and_cold.py", "smoke"], "no 'smoke'; expected some of: torch, "),
        (["scripts.py", "--only", "test_op"], "no 'test_op'; expected some of: "),
        (["scripts_probe.py", "--only", "fsdp3"], "no 'fsdp3'; expected some of: ddp, "),
    ],
)
def test_an_unknown_part_of_a_benchmark_is_refused(arguments: list[str], message: str) -> None:
    command = [sys.executable, str(BENCHMARKS / arguments[0]), *arguments[1:]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2, done.stdout + done.stderr
    assert message in done.stderr
    assert done.stdout == ""
