"""Tests of a GPU: torch stays in subprocesses, for pytester restores sys.modules, and torch cannot be imported twice."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest
from tests.gpu.test_marked import run_without_warnings

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


@pytest.mark.parametrize(
    ("source", "category", "fails"),
    [("pytest", "PytestWarning", False), ("pytest_distcompat.plugin.session", "DistcompatWarning", True)],
)
def test_gpu_tests_fail_on_our_own_warnings_only(
    source: str, category: str, fails: bool, pytester: pytest.Pytester
) -> None:
    """pytest-benchmark warns beside xdist, which is no news of ours."""
    pytester.makepyfile(
        f"import warnings\nfrom {source} import {category}\ndef test_it():\n    warnings.warn({category}('text'))\n"
    )
    expected = pytest.raises(pytest.fail.Exception) if fails else contextlib.nullcontext()
    with expected:
        run_without_warnings(pytester, "-p", "no:randomly").assert_outcomes(passed=1, warnings=1)
