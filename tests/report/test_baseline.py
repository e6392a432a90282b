"""``--distcompat-baseline``: only news makes the run fail."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .conftest import Session

KNOWN = '"fsdp1-bf16_mixed-w2": "wrong"'
WRONG = f'{{{KNOWN}, "fsdp2-fp32-w2": "wrong"}}'
RIGHT = f"{{{KNOWN}}}"


@pytest.fixture
def last(session: Session, tmp_path: Path) -> Path:
    """The report of a run in which one cell was red."""
    done = session("--distcompat-report=last.json", lives=WRONG)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    return tmp_path / "last.json"


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["alone", "xdist"])
def test_an_old_failure_does_not_make_the_run_fail(session: Session, last: Path, workers: tuple[str, ...]) -> None:
    done = session("--distcompat-baseline=last.json", *workers, lives=WRONG)
    assert done.returncode == pytest.ExitCode.OK, done.stdout
    assert "since last.json: 0 newly broken, 0 newly missing, 0 newly fixed, 1 still broken, 0 new" in done.stdout
    assert "nothing is newly broken or newly missing: exit code 0" in done.stdout
    assert "1 failed" in done.stdout


def test_a_new_failure_does(session: Session, last: Path, tmp_path: Path) -> None:
    lives = f'{{{KNOWN}, "fsdp2-fp32-w2": "wrong", "ddp-fp32-w2": "killed"}}'
    # The same file may be the next run's baseline: it is read before it is written.
    done = session("--distcompat-baseline=last.json", "--distcompat-report=last.json", lives=lives)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert "newly broken: ddp-fp32-w2:claim (test_mine:Mine): ok -> CRASH: rank 1 was killed by SIGKILL" in done.stdout
    written = json.loads((tmp_path / "last.json").read_text(encoding="utf-8"))
    assert [change["cell"] for change in written["run"]["baseline"]["broken"]] == ["ddp-fp32-w2"]


def test_what_is_fixed_is_told(session: Session, last: Path) -> None:
    done = session("--distcompat-baseline=last.json", lives=RIGHT)
    assert done.returncode == pytest.ExitCode.OK
    assert "newly fixed: fsdp2-fp32-w2:claim (test_mine:Mine): FAIL -> ok" in done.stdout


def test_a_suite_that_goes_dark_makes_the_run_fail(session: Session, last: Path) -> None:
    done = session("--distcompat-baseline=last.json", "--distcompat-strategies=ddp", lives=RIGHT)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert "newly missing: fsdp1-fp32-w2 (test_mine:Mine): claim: not asked for" in done.stdout
    assert "settings: strategies all -> ddp" in done.stdout


def test_what_a_k_leaves_out_is_no_news(session: Session, last: Path) -> None:
    done = session("--distcompat-baseline=last.json", "-k", "ddp", lives=RIGHT)
    assert done.returncode == pytest.ExitCode.OK, done.stdout
    assert "newly missing: " not in done.stdout


def test_a_failure_that_is_no_verdict_of_ours_is_never_excused(session: Session, last: Path, tmp_path: Path) -> None:
    (tmp_path / "test_theirs.py").write_text("def test(): assert False\n", encoding="utf-8")
    done = session("--distcompat-baseline=last.json", lives=WRONG)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED


def test_a_run_that_was_broken_off_stays_so(session: Session, last: Path) -> None:
    done = session("--distcompat-baseline=last.json", "-x", lives=WRONG)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert ": not reached" in done.stdout
