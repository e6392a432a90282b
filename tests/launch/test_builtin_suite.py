"""The built-in suite on the installed stack, a part of it: in one process, in two xdist workers, and cold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pytest_distcompat import suite
from pytest_distcompat.known import shipped

pytestmark = pytest.mark.spawn

#: Each strategy and each precision once, in one driver; all cells of all drivers are what the suite itself runs.
SMOKE = ("--distcompat-profile=smoke", "--distcompat-drivers=torch")


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


def test_the_smoke_profile_passes_except_for_known_issues(pytester: pytest.Pytester) -> None:
    alone = run(pytester, *SMOKE)
    words = verdicts(alone)
    assert not {place: status for place, status in words.items() if status not in {"passed", "known", "refused"}}
    # What fails is known by a file that comes with the package, not by the suite.
    assert not suite.TestTorch.expect
    reasons = [issue.reason for issue in shipped()]
    declared = [r["reason"] for r in alone["results"] if r["status"] in {"known", "refused"}]
    assert all(any(reason in line for reason in reasons) for line in declared), declared
    assert {cell.partition("-")[0] for _, cell, _ in words} == set(suite.TestTorch.matrix.strategies)
    # Runs are shared between checks.
    assert alone["session"]["runs"] < len(words)


@pytest.mark.nightly
def test_the_default_profile_calls_all_that_only_reads_in_one_cell_of_each_suite(pytester: pytest.Pytester) -> None:
    words = verdicts(run(pytester, "-k", ":walk"))
    assert {name for name, *_ in words} == {"TestTorch", "TestAccelerate", "TestTrainer", "TestDeepSpeed"}
    assert [*words.values()] == ["passed"] * 4


@pytest.mark.nightly
def test_two_workers_come_to_the_same_verdicts_from_as_many_runs(pytester: pytest.Pytester) -> None:
    alone, shared = run(pytester, *SMOKE), run(pytester, *SMOKE, "-n", "2")
    assert verdicts(shared) == verdicts(alone)
    assert shared["session"]["runs"] == alone["session"]["runs"]


@pytest.mark.nightly
def test_below_a_path_that_is_not_utf_8(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries that read checkpoints refuse it; and a trainer makes the directory of an export only if it has one."""
    temporary = pytester.path / "\udcff\udcfe"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    # pytester has a directory of its own for that.
    report = run(
        pytester,
        "-k",
        "TestTorch and fsdp2-fp32-w2: and (names or resume or export)",
        f"--basetemp={temporary / 'base'}",
    )
    assert set(verdicts(report).values()) == {"passed"}
    assert {check for _, _, check in verdicts(report)} >= {"names", "resume", "export"}


@pytest.mark.nightly
def test_the_cold_torchrun_command_gives_the_same_verdicts(pytester: pytest.Pytester) -> None:
    cells, checks = "(fsdp1-fp32-w2: or zero2-bf16_upcast-w2:)", "(active or names or optimizer or dtypes or resume)"
    some = ("-k", f"TestAccelerate and {cells} and {checks}")
    warm, cold = run(pytester, *some), run(pytester, *some, "--distcompat-launcher=torchrun")
    assert len(verdicts(warm)) == 10
    assert verdicts(warm) == verdicts(cold)
    assert warm["session"]["runs"] == cold["session"]["runs"] == 4
