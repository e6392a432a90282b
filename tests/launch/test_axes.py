"""Axes beside each other, in the built-in torch driver: the training of one process, on warm ranks as under torchrun."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytestmark = [pytest.mark.spawn, pytest.mark.nightly]

SUITE = """
from pytest_distcompat import CompatSuite, Matrix

PARTS, STAGES = {"tp": 2}, {"pp": 2}
TWO_EACH = {**STAGES, "pp_schedule": "Interleaved1F1B"}

class TestAxes(CompatSuite):
    driver = "torch"
    matrix = Matrix(
        ("fsdp2",), ("fp32",), world_sizes=(4,),
        options=({**PARTS, **STAGES}, {**STAGES, "compile": "regional"}, TWO_EACH, {**TWO_EACH, **PARTS}),
        extra=(Matrix(("fsdp2",), ("fp32",), world_sizes=(8,), options=({**PARTS, **STAGES},)),),
    )
"""
CELLS = {
    "fsdp2-fp32-w4-tp_2-pp_2",
    "fsdp2-fp32-w4-compile_regional-pp_2",
    "fsdp2-fp32-w4-pp_2-pp_schedule_Interleaved1F1B",
    "fsdp2-fp32-w4-tp_2-pp_2-pp_schedule_Interleaved1F1B",
    "fsdp2-fp32-w8-tp_2-pp_2",
}
#: Files, resumed runs and other meshes take a cold launch each.
COLD = "active or names or parity or clipping or gradients or data or memory"


def verdicts(pytester: pytest.Pytester, *options: str) -> dict[tuple[str, str], str]:
    pytester.makepyfile(SUITE)
    flags = ("--distcompat-gpus=0", "--distcompat-report=report.json", *options)
    pytester.runpytest_subprocess(*flags, timeout=1200)
    report: dict[str, Any] = json.loads((pytester.path / "report.json").read_text())
    return {(r["cell"], r["check"]): r["status"] for r in report["results"] if r["cell"] in CELLS}


def test_tensor_and_pipeline_parallelism_beside_shards(pytester: pytest.Pytester) -> None:
    found = verdicts(pytester, "-k", " or ".join(CELLS))
    assert {cell for cell, _ in found} == CELLS
    assert {*found.values()} == {"passed"}
    assert {check for cell, check in found if "w4-tp" in cell} >= {"active", "resume", "reshard", "portable", "export"}


def test_cold_ranks_come_to_the_same_verdicts(pytester: pytest.Pytester) -> None:
    some = ("-k", f"fsdp2-fp32-w4-tp_2-pp_2 and ({COLD})")
    warm, cold = verdicts(pytester, *some), verdicts(pytester, *some, "--distcompat-launcher=torchrun")
    assert len(warm) == 7
    assert warm == cold
