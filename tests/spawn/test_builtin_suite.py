"""The built-in suite on the installed stack: the main job, whole, in one process, in two xdist workers, and cold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.spawn

#: What is broken in the pinned stack and declared in suite.py; docs/upstream.md tells of each.
KNOWN = {
    "TestTorch": {("ddp", "dtypes"), ("fsdp1", "dtypes"), ("fsdp2", "dtypes")},
    "TestAccelerate": {("ddp", "dtypes"), ("fsdp1", "resume")},
}


def run(pytester: pytest.Pytester, *options: str) -> dict[str, Any]:
    """The JSON report of a run of the built-in suite."""
    path = Path(pytester.path) / "report.json"
    flags = ("--distcompat-gpus=0", f"--distcompat-report={path}", "-p", "no:cacheprovider", *options)
    pytester.runpytest_subprocess("--pyargs", "pytest_distcompat.suite", *flags, timeout=1200)
    report: dict[str, Any] = json.loads(path.read_text())
    return report


def verdicts(report: dict[str, Any]) -> dict[tuple[str, str, str], str]:
    """(suite, cell, check) to status."""
    return {(r["suite"], r["cell"], r["check"]): r["status"] for r in report["results"]}


def test_the_whole_matrix_holds_but_for_what_is_declared_and_two_workers_say_the_same(
    pytester: pytest.Pytester,
) -> None:
    alone = run(pytester)
    found = verdicts(alone)
    assert not {place: status for place, status in found.items() if status not in {"passed", "known", "skipped"}}
    known = {(suite, cell.split("-")[0], check) for (suite, cell, check), status in found.items() if status == "known"}
    assert known == {(suite, *pair) for suite, pairs in KNOWN.items() for pair in pairs}
    # Nothing vanishes: nine cells of three strategies and eighteen of six, and the other models and forms.
    assert len({(suite, cell) for suite, cell, _ in found}) == (9 + 6 + 2) + (18 + 12 + 2)
    assert all(r["reason"].startswith("accelerate gathers") for r in alone["results"] if r["status"] == "skipped")
    # Two lives a cell that runs, however many checks there are.
    ran = {(suite, cell) for (suite, cell, _), status in found.items() if status != "skipped"}
    assert alone["run"]["lives"] == 2 * len(ran)

    shared = run(pytester, "-n", "2")
    assert verdicts(shared) == found
    assert shared["run"]["lives"] == alone["run"]["lives"]


def test_the_cold_torchrun_command_gives_the_same_verdicts(pytester: pytest.Pytester) -> None:
    some = ("-k", "TestAccelerate and (fsdp1-fp32-w2 or zero2-bf16_mixed-w2) and not model and not state_dict")
    warm, cold = run(pytester, *some), run(pytester, *some, "--distcompat-launcher=torchrun")
    assert len(verdicts(warm)) == 10
    assert verdicts(warm) == verdicts(cold)
    assert warm["run"]["lives"] == cold["run"]["lives"] == 4
