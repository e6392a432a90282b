"""Tests of a GPU: torch stays in subprocesses, for pytester restores sys.modules, and torch cannot be imported twice."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.gpu.test_marked import STRICT

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


@pytest.mark.parametrize(("category", "outcome"), [("PytestWarning", "passed"), ("DistcompatWarning", "failed")])
def test_only_our_own_warnings_are_errors(category: str, outcome: str, pytester: pytest.Pytester) -> None:
    """pytest-benchmark warns beside xdist, which is no news of ours."""
    source = "pytest" if category == "PytestWarning" else "pytest_distcompat.plugin.session"
    pytester.makepyfile(
        f"import warnings\nfrom {source} import {category}\ndef test_it():\n    warnings.warn({category}('text'))\n"
    )
    result = pytester.runpytest_subprocess("-p", "no:randomly", *STRICT)
    result.assert_outcomes(**{outcome: 1})
