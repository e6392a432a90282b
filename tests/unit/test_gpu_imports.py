"""Tests of a GPU leave torch to subprocesses: pytester restores sys.modules, and torch cannot be imported twice."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import sys
from tests.gpu import test_suite

def run_suite(chosen, *args):
    return [{"check": check, "status": "passed", "driver": "", "cell": "", "message": ""} for check in ("active", "optimizer", "resume")]

test_suite.test_fsdp2_on_one_gpu("accelerate", "fp8", run_suite, (9, 0))
test_suite.test_zero_on_one_gpu(lambda chosen, *args: [], (9, 0))
print("torch" in sys.modules)
"""


def test_gpu_tests_do_not_import_torch() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1:] == ["False"], done.stdout + done.stderr
