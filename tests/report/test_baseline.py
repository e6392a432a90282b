"""``--distcompat-baseline``: only news makes the run fail."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pytest_distcompat.report.compare import compare
from pytest_distcompat.report.document import Report
from pytest_distcompat.status import Status, Verdict

if TYPE_CHECKING:
    from .conftest import Session

KNOWN = '"fsdp1-bf16_upcast-w2": "wrong"'
WRONG = f'{{{KNOWN}, "fsdp2-fp32-w2": "wrong"}}'
RIGHT = f"{{{KNOWN}}}"


@pytest.fixture
def last(session: Session, tmp_path: Path) -> Path:
    """The report of a run in which one cell was red."""
    done = session("--distcompat-report=last.json", runs=WRONG)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    return tmp_path / "last.json"


@pytest.mark.parametrize("workers", [(), pytest.param(("-n", "2"), marks=pytest.mark.nightly)], ids=["alone", "xdist"])
def test_an_old_failure_does_not_make_the_run_fail(session: Session, last: Path, workers: tuple[str, ...]) -> None:
    done = session("--distcompat-baseline=last.json", *workers, runs=WRONG)
    assert done.returncode == pytest.ExitCode.OK, done.stdout
    assert "since last.json: 0 newly broken, 0 newly missing, 0 newly fixed, 1 still broken, 0 new" in done.stdout
    assert "nothing is newly broken or newly missing: exit code 0" in done.stdout
    assert "1 failed" in done.stdout


def test_a_new_failure_makes_the_session_fail(session: Session, last: Path, tmp_path: Path) -> None:
    runs = f'{{{KNOWN}, "fsdp2-fp32-w2": "wrong", "ddp-fp32-w2": "killed"}}'
    # The same file may be the next run's baseline: it is read before it is written.
    done = session("--distcompat-baseline=last.json", "--distcompat-report=last.json", runs=runs)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert "newly broken: ddp-fp32-w2:claim (test_mine:Mine): ok -> CRASH: rank 1 was killed by SIGKILL" in done.stdout
    written = json.loads((tmp_path / "last.json").read_text(encoding="utf-8"))
    assert [change["cell"] for change in written["session"]["baseline"]["broken"]] == ["ddp-fp32-w2"]


@pytest.mark.nightly
def test_a_fixed_failure_is_reported(session: Session, last: Path) -> None:
    done = session("--distcompat-baseline=last.json", runs=RIGHT)
    assert done.returncode == pytest.ExitCode.OK
    assert "newly fixed: fsdp2-fp32-w2:claim (test_mine:Mine): FAIL -> ok" in done.stdout


@pytest.mark.nightly
def test_a_suite_that_goes_dark_makes_the_run_fail(session: Session, last: Path) -> None:
    done = session("--distcompat-baseline=last.json", "--distcompat-strategies=ddp", runs=RIGHT)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert "newly missing: fsdp1-fp32-w2 (test_mine:Mine): claim: not selected" in done.stdout
    assert "settings: strategies all -> ddp" in done.stdout


@pytest.mark.nightly
@pytest.mark.parametrize("workers", [(), pytest.param(("-n", "2"), marks=pytest.mark.nightly)], ids=["alone", "xdist"])
def test_a_session_without_any_suite_fails(
    session: Session, last: Path, tmp_path: Path, workers: tuple[str, ...]
) -> None:
    (tmp_path / "test_theirs.py").write_text("def test(): pass\n", encoding="utf-8")
    files = ("--distcompat-baseline=last.json", "--distcompat-report=last.json")
    narrow = ("--ignore=test_mine.py", *workers)
    # To list tests, or to run a few, is no run of the suites: their report stays.
    before = (tmp_path / "last.json").read_text(encoding="utf-8")
    for args in (("--collect-only",), ("-k", "test_theirs"), ("test_theirs.py::test",)):
        assert session(*files, *args, *narrow).returncode == pytest.ExitCode.OK
        assert (tmp_path / "last.json").read_text(encoding="utf-8") == before
    done = session(*files, *narrow)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout
    assert "newly missing: fsdp1-fp32-w2 (test_mine:Mine): claim: not selected" in done.stdout
    assert "1 passed" in done.stdout
    assert json.loads((tmp_path / "last.json").read_text(encoding="utf-8"))["results"] == []


@pytest.mark.nightly
def test_a_session_without_any_test_fails(session: Session, last: Path) -> None:
    done = session("--distcompat-baseline=last.json", "--ignore=test_mine.py")
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout
    assert "newly missing: " in done.stdout


@pytest.mark.nightly
def test_items_deselected_by_k_are_not_missing(session: Session, last: Path) -> None:
    done = session("--distcompat-baseline=last.json", "-k", "ddp", runs=RIGHT)
    assert done.returncode == pytest.ExitCode.OK, done.stdout
    assert "newly missing: " not in done.stdout


@pytest.mark.nightly
def test_a_failure_of_an_ordinary_test_is_never_excused(session: Session, last: Path, tmp_path: Path) -> None:
    (tmp_path / "test_theirs.py").write_text("def test(): assert False\n", encoding="utf-8")
    done = session("--distcompat-baseline=last.json", runs=WRONG)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED


@pytest.mark.nightly
@pytest.mark.parametrize(
    "args",
    [pytest.param(("-n", "2"), marks=pytest.mark.nightly), ("--continue-on-collection-errors",)],
    ids=["xdist", "alone"],
)
def test_an_import_error_is_never_excused(session: Session, last: Path, tmp_path: Path, args: tuple[str, ...]) -> None:
    (tmp_path / "test_theirs.py").write_text("import no_such_module\n", encoding="utf-8")
    done = session("--distcompat-baseline=last.json", *args, runs=WRONG)
    assert "1 still broken" in done.stdout
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout


@pytest.mark.nightly
def test_an_exit_code_of_another_plugin_is_never_excused(session: Session, last: Path) -> None:
    cov = ("--cov=.", "--cov-report=", "--cov-fail-under=100")
    done = session("--distcompat-baseline=last.json", *cov, runs=WRONG, COVERAGE_FILE=".cov")
    assert "1 still broken" in done.stdout
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout


@pytest.mark.nightly
def test_a_failed_item_with_a_good_verdict_is_never_excused(session: Session, last: Path, tmp_path: Path) -> None:
    (tmp_path / "strict.py").write_text(
        "import pytest\n"
        "def pytest_collection_modifyitems(items):\n"
        "    for item in items:\n"
        "        if 'ddp-fp32' in item.name: item.add_marker(pytest.mark.xfail(strict=True))\n",
        encoding="utf-8",
    )
    done = session("-p", "strict", "--distcompat-baseline=last.json", runs=WRONG, PYTHONPATH=str(tmp_path))
    assert "2 failed" in done.stdout
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout


@pytest.mark.nightly
def test_items_that_a_narrowed_session_did_not_reach_are_missing(session: Session, tmp_path: Path) -> None:
    session("--distcompat-report=last.json", runs='{"ddp-fp32-w2": "wrong"}')
    args = ("--distcompat-baseline=last.json", "-k", "TestMine", "-x")
    done = session(*args, runs='{"ddp-fp32-w2": "wrong"}')
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout
    assert ": not reached" in done.stdout


@pytest.mark.nightly
def test_an_interrupted_session_keeps_its_exit_code(session: Session, last: Path) -> None:
    done = session("--distcompat-baseline=last.json", "-x", runs=WRONG)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert ": not reached" in done.stdout


@pytest.mark.nightly
def test_a_crash_instead_of_a_finding_is_newly_broken(session: Session, last: Path) -> None:
    done = session("--distcompat-baseline=last.json", runs=f'{{{KNOWN}, "fsdp2-fp32-w2": "killed"}}')
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout
    assert "newly broken: fsdp2-fp32-w2:claim (test_mine:Mine): FAIL -> CRASH: rank 1 was killed" in done.stdout


@pytest.mark.nightly
@pytest.mark.parametrize("workers", [(), pytest.param(("-n", "2"), marks=pytest.mark.nightly)], ids=["alone", "xdist"])
def test_a_new_teardown_failure_is_newly_broken_once(
    session: Session, last: Path, tmp_path: Path, workers: tuple[str, ...]
) -> None:
    (tmp_path / "leaves.py").write_text(
        "import pytest\n"
        "@pytest.fixture(autouse=True)\n"
        "def leaves(request):\n"
        "    yield\n"
        "    assert 'fsdp2-fp32' not in request.node.name, 'it left something'\n",
        encoding="utf-8",
    )
    both = ("-p", "leaves", "--distcompat-baseline=last.json", "--distcompat-report=last.json", *workers)
    done = session(*both, runs=WRONG, PYTHONPATH=str(tmp_path))
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout
    message = "newly broken: fsdp2-fp32-w2:claim (test_mine:Mine): FAIL -> FAIL: rank 1: something is wrong; and in its teardown: "
    assert f"{message}AssertionError: it left something" in done.stdout
    done = session(*both, runs=WRONG, PYTHONPATH=str(tmp_path))
    assert done.returncode == pytest.ExitCode.OK, done.stdout
    assert "0 newly broken, 0 newly missing, 0 newly fixed, 1 still broken" in done.stdout


@pytest.mark.parametrize(
    ("was", "now", "same"),
    [
        ("the loss is 0.7358; 0.7344 in the reference", "the loss is 0.74; 0.7e-3 in the reference", True),
        ("rank 0: no such file: '/tmp/a_b/x'", "rank 1: no such file: '/tmp/c/y'", True),
        ("rank 0: parameter 'a' is missing", "rank 0: parameter 'b' is missing", False),
    ],
)
def test_a_changed_message_of_a_still_broken_item_is_shown(was: str, now: str, same: bool) -> None:
    def report(message: str) -> Report:
        result = Verdict(
            "names",
            "ddp-fp32-w2",
            Status.FAILED,
            message,
            driver="d",
            nodeid="test_it.py::S::test[ddp-fp32-w2:names]",
        )
        return Report({}, [result], [])

    comparison = compare(report(was), report(now))
    assert (len(comparison.broken), len(comparison.still)) == (0, 1)
    line = f"still broken, otherwise: ddp-fp32-w2:names (d): FAIL -> FAIL: {now}; it was: {was}"
    assert (line in list(comparison.lines())) is not same


def test_items_broken_by_one_cause_are_reported_once() -> None:
    def report(status: str, message: str, reason: str = "") -> Report:
        results = [
            Verdict(
                check,
                cell,
                Status.from_name(status),
                message.format(rank),
                reason,
                suite="S",
                driver="d",
                nodeid=f"test_it.py::S::test[{cell}:{check}]",
            )
            for rank, cell in enumerate(("ddp-fp32-w2", "fsdp2-fp32-w2"))
            for check in ("names", "resume")
        ]
        return Report({}, results, [])

    crashed = report("crashed", "rank {} was killed by SIGKILL", "org/repo#1, which is about something else")
    news = [line for line in compare(report("passed", ""), crashed).lines() if "broken:" in line or line[0] == " "]
    assert news == [
        "newly broken: 4 verdicts: ok -> CRASH: rank 0 was killed by SIGKILL",
        "  ddp-fp32-w2 (d): names, resume",
        "  fsdp2-fp32-w2 (d): names, resume",
    ]
