"""Outputs of a session: report files, JUnit, report log, a step's summary; with xdist and when interrupted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest

from pytest_distcompat import report as report_room

from .conftest import command, write_session

if TYPE_CHECKING:
    from .conftest import Session

SCHEMA = json.loads(Path(report_room.__file__).with_name("schema.json").read_text(encoding="utf-8"))
RUNS = '{"fsdp2-fp32-w2": "wrong", "ddp-bf16_upcast-w2": "killed", "fsdp1-bf16_upcast-w2": "wrong"}'
#: What is declared to fail does; nothing else.
WELL = '{"fsdp1-bf16_upcast-w2": "wrong"}'
STATUS = {
    "ddp-fp32-w2": "passed",
    "ddp-bf16_upcast-w2": "crashed",
    "fsdp1-fp32-w2": "passed",
    "fsdp1-bf16_upcast-w2": "known",
    "fsdp2-fp32-w2": "failed",
    "fsdp2-bf16_upcast-w2": "passed",
    "ddp-bf16_pure-w2": "skipped",
    "fsdp1-bf16_pure-w2": "skipped",
    "fsdp2-bf16_pure-w2": "skipped",
}
#: The order of the matrix.
ORDER = [
    "ddp-fp32-w2",
    "ddp-bf16_upcast-w2",
    "ddp-bf16_pure-w2",
    "fsdp1-fp32-w2",
    "fsdp1-bf16_upcast-w2",
    "fsdp1-bf16_pure-w2",
    "fsdp2-fp32-w2",
    "fsdp2-bf16_upcast-w2",
    "fsdp2-bf16_pure-w2",
]


def load(path: Path) -> dict[str, Any]:
    text = path.read_text(encoding="utf-8")
    data: dict[str, Any] = json.loads(text)
    jsonschema.Draft202012Validator(SCHEMA).validate(data)
    return data


def statuses(data: dict[str, Any]) -> dict[str, str]:
    return {result["cell"]: result["status"] for result in data["results"]}


def results_by_cell(data: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {result["cell"]: result for result in data["results"]}


def rows_by_cell(data: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {cell["cell"]: cell for cell in data["cells"]}


def results_with(data: dict[str, Any], status: str) -> list[dict[str, Any]]:
    """Return the results with this status."""
    return [result for result in data["results"] if result["status"] == status]


def lines_that_start_with(start: str, text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(start)]


@pytest.mark.parametrize("workers", [(), pytest.param(("-n", "2"), marks=pytest.mark.nightly)], ids=["alone", "xdist"])
def test_all_files_of_one_run(session: Session, tmp_path: Path, workers: tuple[str, ...]) -> None:
    files = ["out.json", "out.md", "out.html", "out.txt"]
    options = [f"--distcompat-report={file}" for file in files]
    done = session(*options, *workers, runs=RUNS)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    data = load(tmp_path / "out.json")
    assert statuses(data) == STATUS
    # In the order of the matrix, whichever worker was first.
    assert list(results_by_cell(data)) == ORDER
    assert list(rows_by_cell(data)) == ORDER
    assert len(data["results"]) == len(data["cells"]) == len(ORDER)
    markdown = (tmp_path / "out.md").read_text(encoding="utf-8")
    for cell in STATUS:
        assert f"| {cell} |" in markdown
    assert "2 failed" in (tmp_path / "out.txt").read_text(encoding="utf-8")
    assert "fsdp2-fp32-w2" in (tmp_path / "out.html").read_text(encoding="utf-8")
    expected = [f"report: {file}" for file in files]
    assert lines_that_start_with("report: ", done.stdout) == expected


def test_the_json_of_a_crashed_cell(session: Session, tmp_path: Path) -> None:
    session("--distcompat-report=out.json", runs=RUNS)
    data = load(tmp_path / "out.json")
    result = results_with(data, "crashed")[0]
    assert result["rank"] == 1
    assert result["facets"] == {"strategy": "ddp", "precision": "bf16_upcast", "world_size": 2}
    assert result["reproduce"] == "pytest 'test_mine.py::TestMine::test[ddp-bf16_upcast-w2:claim]'"
    rows = rows_by_cell(data)
    runs = {run["id"]: run for run in data["runs"]}
    (run_id,) = runs.keys() & rows[result["cell"]]["runs"]
    run = runs[run_id]
    assert run["name"] == "train"
    assert run["ending"] == "crashed"
    assert run["seconds"] == 1.5
    first, second = run["ranks"]
    assert first["rank"] == 1
    assert first["status"] == "killed"
    assert first["message"] == "was killed by SIGKILL during 'step'"
    assert first["output"] == "rank 0: the last words of rank 1"
    assert second["rank"] == 0
    assert second["status"] == "stopped"
    assert second["message"] == "was killed by SIGTERM"
    assert second["output"] == ""
    assert rows["ddp-fp32-w2"]["steps"]["loss"] == [4.0]
    counts = data["session"]["counts"]
    assert counts["selected"] == 9
    assert counts["ran"] == 6
    assert counts["unreached"] == 0
    assert counts["red"] == 2
    assert counts["skipped"] == 3
    assert counts["known"] == 1
    assert data["session"]["timeline"], "no lease was recorded"


def test_the_blamed_rank_comes_from_the_ranks_not_from_the_message(session: Session, tmp_path: Path) -> None:
    session("--distcompat-report=out.json", runs='{"fsdp2-bf16_upcast-w2": "raised"}')
    results = results_by_cell(load(tmp_path / "out.json"))
    failed = results["fsdp2-bf16_upcast-w2"]
    assert failed["message"].splitlines()[0] == "rank 1 raised ValueError: no"
    assert "rank 7 is odd" in failed["message"].splitlines()[-1]
    assert failed["status"] == "failed"
    assert failed["rank"] == 1
    assert failed["ended_run"] == "train"
    # Also of what is not red, somebody may want to see one alone.
    assert results["ddp-fp32-w2"]["reproduce"].endswith("test[ddp-fp32-w2:claim]'")


#: Two cells end in one way, a third in another; a test beside them fails too.
THREE = '{"ddp-fp32-w2": "killed", "fsdp1-bf16_upcast-w2": "wrong", "fsdp2-fp32-w2": "wrong", "fsdp2-bf16_upcast-w2": "killed"}'


@pytest.mark.parametrize("workers", [(), pytest.param(("-n", "2"), marks=pytest.mark.nightly)], ids=["alone", "xdist"])
def test_a_cause_is_shown_once_with_its_verdicts_beneath(
    session: Session, tmp_path: Path, workers: tuple[str, ...]
) -> None:
    (tmp_path / "test_other.py").write_text("def test_other(): assert not 'theirs'", encoding="utf-8")
    done = session("--junitxml=junit.xml", *workers, runs=THREE)
    failures = done.stdout.partition("= FAILURES =")[2].partition("distributed compatibility")[0]
    pytest.LineMatcher(failures.splitlines()).fnmatch_lines(
        [
            "*_ test_other _*",
            "*_ TestMine.test[[]fsdp2-fp32-w2:claim[]] _*",
            "rank 1: something is wrong",
            "*_ TestMine.test[[]ddp-fp32-w2:claim[]] _*",
            "rank 1 was killed by SIGKILL during 'step'",
            "*- this cause has 2 verdicts (-vv shows each) -*",
            "ddp-fp32-w2 (test_mine:Mine): claim",
            "fsdp2-bf16_upcast-w2 (test_mine:Mine): claim",
        ]
    )
    assert failures.count("rank 1 was killed by SIGKILL during 'step'\n\n") == 1
    # Other readers of the reports have each failure, and its finding first.
    summary = lines_that_start_with("FAILED test_mine", done.stdout)
    messages = [line.partition(" - ")[2] for line in summary]
    assert messages == [
        "rank 1: something is wrong",
        "rank 1 was killed by SIGKILL during 'step'",
        "rank 1 was killed by SIGKILL during 'step'",
    ]
    cases = junit_cases(tmp_path / "junit.xml")
    for cell in ("ddp-fp32-w2", "fsdp2-bf16_upcast-w2"):
        failure = cases[f"test[{cell}:claim]"].find("failure")
        assert failure is not None
        assert failure.get("message") == "rank 1 was killed by SIGKILL during 'step'"
        assert f"reproduce: pytest 'test_mine.py::TestMine::test[{cell}:claim]'" in (failure.text or "")


def junit_cases(path: Path) -> dict[str, ET.Element]:
    """Return the test cases of a JUnit file, by name."""
    return {case.get("name", ""): case for case in ET.parse(path).iter("testcase")}


def properties_of(case: ET.Element) -> dict[str | None, str | None]:
    return {prop.get("name"): prop.get("value") for prop in case.iter("property")}


@pytest.mark.parametrize("workers", [(), pytest.param(("-n", "2"), marks=pytest.mark.nightly)], ids=["alone", "xdist"])
def test_junit_and_the_report_log_have_properties(session: Session, tmp_path: Path, workers: tuple[str, ...]) -> None:
    session("--junitxml=junit.xml", "--report-log=log.jsonl", *workers, runs=RUNS)
    cases = junit_cases(tmp_path / "junit.xml")
    crashed = properties_of(cases["test[ddp-bf16_upcast-w2:claim]"])
    assert "torch " in str(crashed.pop("distcompat_versions"))
    assert crashed == {
        "distcompat_cell": "ddp-bf16_upcast-w2",
        "distcompat_driver": "test_mine:Mine",
        "distcompat_check": "claim",
        "distcompat_status": "crashed",
        "distcompat_rank": "1",
    }
    passed = properties_of(cases["test[ddp-fp32-w2:claim]"])
    assert passed["distcompat_status"] == "passed"
    assert "distcompat_rank" not in passed
    log = (tmp_path / "log.jsonl").read_text(encoding="utf-8")
    logged_cells = []
    for line in log.splitlines():
        entry = json.loads(line)
        if entry.get("when") == "call":
            properties = dict(entry["user_properties"])
            logged_cells.append(properties["distcompat_cell"])
    assert sorted(logged_cells) == sorted(STATUS)


@pytest.mark.nightly
def test_the_summary_of_a_workflows_step_is_written_on_its_own(session: Session, tmp_path: Path) -> None:
    summary = tmp_path / "summary.md"
    summary.write_text("before\n", encoding="utf-8")
    done = session(runs=RUNS, GITHUB_STEP_SUMMARY=str(summary))
    text = summary.read_text(encoding="utf-8")
    assert text.startswith("before\n# Distributed compatibility\n")
    assert "| fsdp2-fp32-w2 | FAIL |" in text
    assert "report: " not in done.stdout


@pytest.mark.nightly
def test_a_file_that_cannot_be_written_does_not_hide_the_others(session: Session, tmp_path: Path) -> None:
    (tmp_path / "full.md").symlink_to("/dev/full")
    done = session("--distcompat-report=full.md", "--distcompat-report=out.json")
    assert "report: full.md could not be written: " in done.stdout
    assert len(load(tmp_path / "out.json")["results"]) == 9


def test_a_report_through_a_pipe_is_not_read_first(
    session: Session, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    os.mkfifo(tmp_path / "out.json")
    command_line = ["cat", str(tmp_path / "out.json")]
    reader = subprocess.Popen(command_line, stdout=subprocess.PIPE, text=True)
    request.addfinalizer(reader.kill)
    done = session("--distcompat-report=out.json", runs=WELL)
    received, _ = reader.communicate(timeout=60)
    assert done.returncode == pytest.ExitCode.OK, done.stdout
    assert len(json.loads(received)["results"]) == 9


@pytest.mark.nightly
def test_an_unwritable_report_makes_the_session_fail(session: Session, tmp_path: Path) -> None:
    (tmp_path / "full.json").symlink_to("/dev/full")
    done = session("--distcompat-report=full.json", runs=WELL)
    assert "full.json could not be written: " in done.stdout
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout
    assert " failed" not in done.stdout
    asked_by_nobody = session(runs=WELL, GITHUB_STEP_SUMMARY="/dev/full")
    assert "/dev/full could not be written: " in asked_by_nobody.stdout
    assert asked_by_nobody.returncode == pytest.ExitCode.OK, asked_by_nobody.stdout


@pytest.mark.nightly
@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("workers", [(), pytest.param(("-n", "2"), marks=pytest.mark.nightly)], ids=["alone", "xdist"])
def test_ctrl_c_writes_the_results_so_far(tmp_path: Path, workers: tuple[str, ...]) -> None:
    write_session(tmp_path, '{"fsdp1-fp32-w2": "wait 60"}')
    line = command(tmp_path, "--distcompat-report=out.json", "--distcompat-report=out.md", *workers)
    # As a terminal does it: the signal goes to all processes of the group.
    process = subprocess.Popen(line, cwd=tmp_path, stdout=subprocess.PIPE, text=True, start_new_session=True)
    deadline = time.monotonic() + 60
    while not (tmp_path / "waiting").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    # By then the others, which come before it or are another worker's, have ended.
    time.sleep(1)
    os.killpg(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == pytest.ExitCode.INTERRUPTED, out
    data = load(tmp_path / "out.json")
    status_by_cell = statuses(data)
    assert status_by_cell["ddp-fp32-w2"] == "passed"
    assert "fsdp1-fp32-w2" not in status_by_cell
    assert data["session"]["ending"] == "interrupted"
    assert data["session"]["counts"]["selected"] == 9
    assert "test_mine.py::TestMine::test[fsdp1-fp32-w2:claim]" in data["unreached"]
    endings = {run["ending"] for run in data["runs"] if run["cell"] == "fsdp1-fp32-w2"}
    assert endings == {"unfinished"}
    assert "**Interrupted**" in (tmp_path / "out.md").read_text(encoding="utf-8")
    assert f"interrupted: {len(data['unreached'])} items were not reached" in out


@pytest.mark.parametrize("workers", [(), pytest.param(("-n", "1"), marks=pytest.mark.nightly)], ids=["alone", "xdist"])
def test_a_session_stopped_by_exitfirst_says_so(session: Session, tmp_path: Path, workers: tuple[str, ...]) -> None:
    session("-x", *workers, "--distcompat-report=out.json", runs='{"ddp-fp32-w2": "wrong"}')
    data = load(tmp_path / "out.json")
    done = len(data["results"])
    assert data["session"]["ending"] == "stopped"
    assert done + len(data["unreached"]) == 9
    # A worker of xdist has the next test in hand.
    assert done == 1 or workers


def test_an_item_without_a_verdict_is_an_error(session: Session, tmp_path: Path) -> None:
    """A fixture of the adopter's that fails, or skips: in the matrix too, not only among pytest's errors."""
    (tmp_path / "plugin_of_theirs.py").write_text(
        "import pytest\n"
        "@pytest.fixture(autouse=True)\n"
        "def theirs(request):\n"
        "    if 'fsdp2-fp32' in request.node.name: raise OSError('no disk')\n"
        "    if 'fsdp1-fp32' in request.node.name: pytest.skip('no licence')\n"
        "    yield\n"
        "    if 'ddp-fp32' in request.node.name: raise OSError('disk full')\n",
        encoding="utf-8",
    )
    done = session("-p", "plugin_of_theirs", "--distcompat-report=out.json", PYTHONPATH=str(tmp_path))
    data = load(tmp_path / "out.json")
    results = results_by_cell(data)
    failed = results["fsdp2-fp32-w2"]
    assert failed["status"] == "error"
    assert "OSError: no disk" in failed["message"].splitlines()[0]
    assert failed["driver"] == "test_mine:Mine"
    skipped = results["fsdp1-fp32-w2"]
    assert skipped["status"] == "skipped"
    assert skipped["reason"] == "no licence"
    assert results["ddp-fp32-w2"]["status"] == "error"
    rows = [line.split() for line in done.stdout.splitlines()]
    assert ["fsdp2-fp32-w2", "ERROR"] in rows


@pytest.mark.nightly
def test_an_xfail_mark_excuses_no_crash_of_an_item(session: Session, tmp_path: Path) -> None:
    (tmp_path / "excusing.py").write_text(
        "import pytest\n"
        "def pytest_collection_modifyitems(items):\n"
        "    for item in items: item.add_marker(pytest.mark.xfail)\n",
        encoding="utf-8",
    )
    runs = '{"fsdp2-fp32-w2": "wrong", "ddp-bf16_upcast-w2": "killed"}'
    done = session("-p", "excusing", "-rfx", runs=runs, PYTHONPATH=str(tmp_path))
    failed = [line.split(" - ")[0] for line in lines_that_start_with("FAILED ", done.stdout)]
    excused = [line.split(" - ")[0] for line in lines_that_start_with("XFAIL ", done.stdout)]
    assert set(failed) == {"FAILED test_mine.py::TestMine::test[ddp-bf16_upcast-w2:claim]"}
    assert "XFAIL test_mine.py::TestMine::test[fsdp2-fp32-w2:claim]" in excused
    assert done.returncode == pytest.ExitCode.TESTS_FAILED


@pytest.mark.nightly
def test_the_group_of_xdist_is_no_part_of_an_items_name(session: Session, tmp_path: Path) -> None:
    (tmp_path / "grouped.py").write_text(
        # As xdist does it, with any version of pytest.
        "import pytest\n"
        "whole = pytest.Item.nodeid\n"
        "def pytest_configure(config):\n"
        "    if hasattr(config, 'workerinput'):\n"
        "        pytest.Item.nodeid = property(lambda item: whole.fget(item) + '@one')\n"
        "@pytest.hookimpl(wrapper=True)\n"
        "def pytest_runtest_makereport(item):\n"
        "    report = yield\n"
        "    report.nodeid = item.nodeid\n"
        "    return report\n"
        "@pytest.fixture(autouse=True)\n"
        "def theirs(request):\n"
        "    if 'fsdp2-fp32' in request.node.name: raise OSError('no disk')\n",
        encoding="utf-8",
    )
    args = ("-n", "2", "--dist", "loadgroup", "-p", "grouped", "-v", "--distcompat-report=out.json")
    done = session(*args, runs='{"ddp-fp32-w2": "wrong"}', PYTHONPATH=str(tmp_path))
    assert "test[ddp-fp32-w2:claim]@one" in done.stdout
    data = load(tmp_path / "out.json")
    expected = {f"test_mine.py::TestMine::test[{cell}:claim]" for cell in STATUS}
    nodeids = {result["nodeid"] for result in data["results"]}
    assert nodeids == expected
    assert data["unreached"] == []
    status_by_cell = statuses(data)
    assert status_by_cell["ddp-fp32-w2"] == "failed"
    assert status_by_cell["fsdp2-fp32-w2"] == "error"
    failed = results_with(data, "failed")
    assert "@" not in failed[0]["reproduce"]


@pytest.mark.nightly
def test_a_worker_that_dies_is_an_error_of_its_item(session: Session, tmp_path: Path) -> None:
    (tmp_path / "deadly.py").write_text(
        "import os, pytest\n"
        "@pytest.fixture(autouse=True)\n"
        "def deadly(request):\n"
        "    if 'fsdp2-fp32' in request.node.name: os._exit(7)\n",
        encoding="utf-8",
    )
    session("-n", "1", "-p", "deadly", "--distcompat-report=out.json", PYTHONPATH=str(tmp_path))
    data = load(tmp_path / "out.json")
    (dead,) = results_with(data, "error")
    assert dead["cell"] == "fsdp2-fp32-w2"
    assert "crashed while running" in dead["message"]
    assert data["session"]["counts"]["selected"] == 9
