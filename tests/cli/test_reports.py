"""``distcompat diff``, ``merge`` and ``report``: what they say, and their exit codes."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from pytest_distcompat import report as report_room
from pytest_distcompat.cli import main
from pytest_distcompat.report.compare import compare
from pytest_distcompat.report.document import Report
from pytest_distcompat.report.merge import merge
from pytest_distcompat.report.result import Row, Table
from pytest_distcompat.report.write import write_report
from pytest_distcompat.status import Status, Verdict

ROOT = Path(__file__).parents[2]
REAL = ROOT / "tests" / "report" / "real.json"
SCHEMA = json.loads(Path(report_room.__file__).with_name("schema.json").read_text(encoding="utf-8"))


def made(place: str = "t.py::S", **statuses: str) -> Report:
    """Return a report with one check of these cells: ``ddp_2="passed"``."""
    results = []
    for name, status in statuses.items():
        strategy, _, size = name.partition("_")
        cell = f"{strategy}-fp32-w{size}"
        nodeid = f"{place}::test[{cell}:names]"
        message = "rank 0: is wrong" if status == "failed" else ""
        verdict = Verdict("names", cell, Status.from_name(status), message, suite="S", driver="d", nodeid=nodeid)
        results.append(verdict)
    session = {
        "versions": {"torch": "2.12.0", "accelerate": "1.14.0"},
        "runs": 3,
        "seconds": 1.5,
        "device": "cpu",
        "world_size": 2,
        "settings": {"profile": {"value": "default", "from": "default"}},
        "timeline": [],
    }
    rows = [Row("S", "d", result.cell, place, runs=["one"]) for result in results]
    return Report(session, results, rows)


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def assert_fits_schema(path: Path) -> None:
    jsonschema.Draft202012Validator(SCHEMA).validate(read_json(path))


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write(name: str, report: Report) -> str:
        path = tmp_path / name
        write_report(path, report)
        return str(path)

    return write


def test_a_message_does_nothing_to_the_terminal(write: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    before = made(ddp_2="passed")
    after = made(ddp_2="failed")
    evil = "rank 0: \x1b[2J\x1b]0;title\x07 is \x9b31m wrong \udc80"
    after.results[0] = dataclasses.replace(after.results[0], message=evil, driver="d\n\x1b[1A")
    # As somebody else may have written it: our own writer leaves out what has no encoding.
    changed = tmp_path / "after.json"
    changed.write_text(after.to_text(), encoding="utf-8")
    assert main(["diff", write("before.json", before), str(changed)]) == 1
    out = capsys.readouterr().out
    assert "\x1b" not in out
    expected = r"rank 0: \x1b[2J\x1b]0;title\x07 is \x9b31m wrong \udc80"
    assert f"newly broken: ddp-fp32-w2:names (d\\n\\x1b[1A): ok -> FAIL: {expected}" in out.splitlines()
    data = json.loads(after.to_text())
    data["format"] = "\x1b[2J"
    changed.write_text(json.dumps(data), encoding="utf-8")
    assert main(["diff", str(changed), str(changed)]) == 2
    oddly_named = tmp_path / "\x1b[2J.json"
    oddly_named.write_text("[]", encoding="utf-8")
    assert main(["merge", str(oddly_named), "-o", str(tmp_path / "o.json")]) == 2
    assert "\x1b" not in capsys.readouterr().err


#: Status before and today (empty: no such verdict) to what that is.
NEWS = [
    ("passed", "failed", "broken"),
    ("known", "crashed", "broken"),
    ("skipped", "failed", "broken"),
    ("", "hung", "broken"),
    ("passed", "error", "broken"),
    ("passed", "", "missing"),
    ("failed", "", "missing"),
    ("passed", "skipped", "missing"),
    ("failed", "skipped", "missing"),
    ("failed", "passed", "fixed"),
    ("failed", "known", "fixed"),
    ("known", "passed", "fixed"),
    ("fixed?", "passed", "fixed"),
    ("failed", "crashed", "broken"),
    ("crashed", "crashed", "still"),
    ("failed", "failed", "still"),
    ("", "passed", "new"),
    ("passed", "passed", ""),
    ("passed", "known", ""),
    ("skipped", "", ""),
    ("skipped", "skipped", ""),
    ("skipped", "passed", ""),
    ("refused", "passed", ""),
]


def with_verdict(status: str) -> Report:
    """Return a report with this verdict, or without it if the status is empty."""
    if status:
        return made(ddp_2=status, fsdp2_2="failed")
    return made(fsdp2_2="failed")


@pytest.mark.parametrize(("before", "after", "kind"), NEWS)
def test_the_change_of_a_verdict(before: str, after: str, kind: str, write: Any) -> None:
    old = with_verdict(before)
    now = with_verdict(after)
    comparison = compare(old, now)
    # That of fsdp2 is still red.
    expected = {"broken": 0, "missing": 0, "fixed": 0, "still": 1, "new": 0}
    if kind:
        expected[kind] += 1
    for name, number in expected.items():
        assert len(getattr(comparison, name)) == number, name
    code = main(["diff", write("old.json", old), write("now.json", now)])
    assert code == (kind in {"broken", "missing"})


def test_diff_shows_changes_and_versions(write: Any, capsys: pytest.CaptureFixture[str]) -> None:
    old = made(ddp_2="passed", fsdp1_2="passed", fsdp2_2="failed", zero1_2="passed", zero2_2="passed", zero3_2="known")
    now = made(ddp_2="passed", fsdp1_2="failed", fsdp2_2="passed", zero2_2="skipped", zero3_2="known")
    now.session["versions"] = {"torch": "2.13.0", "accelerate": "1.14.0", "deepspeed": "0.19.8"}
    now.session["settings"] = {"profile": {"value": "smoke", "from": "option"}}
    now.results[3] = dataclasses.replace(now.results[3], reason="2 ranks need 2 GPUs, 1 to use")
    assert main(["diff", write("old.json", old), write("now.json", now)]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "1 newly broken, 2 newly missing, 1 newly fixed, 0 still broken, 0 new",
        "versions: torch 2.12.0 -> 2.13.0, deepspeed none -> 0.19.8",
        "settings: profile default -> smoke",
        "selected 6 -> 5, ran 6 -> 4, skipped 0 -> 1, unreached 0, red 1, known 1, fixed? 0",
        "newly broken: fsdp1-fp32-w2:names (d): ok -> FAIL: rank 0: is wrong",
        "newly missing: zero2-fp32-w2 (d): names: 2 ranks need 2 GPUs, 1 to use",
        "newly missing: zero1-fp32-w2 (d): names: not selected",
        "newly fixed: fsdp2-fp32-w2:names (d): FAIL -> ok",
    ]


def test_unreached_items_are_missing_with_the_reason(write: Any, capsys: pytest.CaptureFixture[str]) -> None:
    old = made(ddp_2="passed", fsdp1_2="passed")
    now = made(ddp_2="passed")
    now.unreached = [old.results[1].nodeid]
    assert main(["diff", write("old.json", old), write("now.json", now)]) == 1
    assert "newly missing: fsdp1-fp32-w2 (d): names: not reached" in capsys.readouterr().out
    assert main(["diff", "--allow-missing", write("old.json", old), write("now.json", now)]) == 0


def test_equal_reports_have_no_difference(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", str(REAL), str(REAL)]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "0 newly broken, 0 newly missing, 0 newly fixed, 49 still broken, 0 new"
    assert len(out) == 2


def test_diff_as_json_is_what_the_schema_calls_a_baseline(write: Any, capsys: pytest.CaptureFixture[str]) -> None:
    old = made(ddp_2="passed", fsdp1_2="failed")
    now = made(ddp_2="failed", fsdp1_2="passed")
    main(["diff", "--json", write("old.json", old), write("now.json", now)])
    data = json.loads(capsys.readouterr().out)
    schema = {"$defs": SCHEMA["$defs"], "$ref": "#/$defs/session/properties/baseline"}
    jsonschema.Draft202012Validator(schema).validate(data)
    (change,) = data["broken"]
    assert change["after"] == "failed"


def test_two_suites_of_one_name_are_kept_apart() -> None:
    first = made("a.py::S", ddp_2="passed")
    second = made("b.py::S", ddp_2="failed")
    both = merge([first, second])
    of_first, of_second = both.results
    assert of_first.status == "passed"
    assert of_second.status == "failed"
    moved = merge([made("c/a.py::S", ddp_2="passed"), made("c/b.py::S", ddp_2="failed")])
    comparison = compare(both, moved)
    assert comparison.broken == []
    assert comparison.fixed == []
    assert comparison.missing == []
    assert len(comparison.still) == 1


def test_a_suite_is_compared_with_itself_and_not_with_one_of_its_name() -> None:
    yesterday = made("a.py::S", ddp_2="failed")
    moved = made("b.py::S", ddp_2="failed")
    comparison = compare(yesterday, moved)
    assert len(comparison.still) == 1, "it was moved"
    assert comparison.broken == [], "it was moved"
    assert comparison.missing == [], "it was moved"
    both_yesterday = merge([yesterday, made("b.py::S", ddp_2="passed")])
    comparison = compare(both_yesterday, made("b.py::S", ddp_2="failed"))
    assert len(comparison.broken) == 1
    assert len(comparison.missing) == 1
    assert comparison.still == []
    # That of another suite, which is still there, is nobody else's yesterday.
    both_today = merge([made("a.py::S", fsdp1_2="passed"), made("b.py::S", ddp_2="failed")])
    comparison = compare(yesterday, both_today)
    assert len(comparison.broken) == 1
    assert len(comparison.missing) == 1
    assert comparison.still == []


def test_an_item_without_a_driver_is_compared_by_its_node_id() -> None:
    good = made(ddp_2="passed")
    bad = made(ddp_2="error")
    bad.results = [dataclasses.replace(result, driver="") for result in bad.results]
    bad.rows = [dataclasses.replace(row, driver="") for row in bad.rows]
    for order in ([good, bad], [bad, good]):
        both = merge(order)
        (result,) = both.results
        assert result.driver == "d"
        assert result.status == "error"
        (row,) = both.rows
        assert row.driver == "d"
    comparison = compare(made(ddp_2="error"), bad)
    assert len(comparison.still) == 1
    assert comparison.broken == []
    assert comparison.missing == []
    # Another way to be red is news.
    comparison = compare(made(ddp_2="failed"), bad)
    assert len(comparison.broken) == 1
    assert comparison.still == []
    assert comparison.missing == []


@pytest.mark.parametrize("order", [("failed", "passed"), ("passed", "failed")])
def test_the_matrix_shows_the_worst_of_parametrized_items(order: tuple[str, str]) -> None:
    first, second = map(Status.from_name, order)
    results = [
        Verdict("names", "ddp-fp32-w2", first, nodeid="t.py::S::test[a-ddp-fp32-w2:names]"),
        Verdict("names", "ddp-fp32-w2", second, nodeid="t.py::S::test[b-ddp-fp32-w2:names]"),
    ]
    table = Table.of(results)
    assert table.word("ddp-fp32-w2", "names") == "FAIL"
    # Compared, each is its own yesterday.
    report = dataclasses.replace(made(), results=results)
    now = dataclasses.replace(made(), results=results[::-1])
    comparison = compare(report, now)
    assert comparison.broken == []
    assert comparison.fixed == []
    assert len(comparison.still) == 1


def test_merge_takes_the_worst_and_prefers_what_ran() -> None:
    first = made(ddp_2="passed", fsdp1_2="skipped", fsdp2_2="failed", zero1_2="known")
    second = made(ddp_2="crashed", fsdp1_2="passed", fsdp2_2="passed", zero1_2="passed", zero3_2="passed")
    first.unreached = [second.results[-1].nodeid, "t.py::S::test[zero2-fp32-w2:names]"]
    first.session["ending"] = "interrupted"
    second.session["versions"] = {"torch": "2.13.0"}
    both = merge([first, second])
    statuses = {result.cell: result.status for result in both.results}
    assert statuses == {
        "ddp-fp32-w2": "crashed",
        "fsdp1-fp32-w2": "passed",
        "fsdp2-fp32-w2": "failed",
        "zero1-fp32-w2": "known",
        "zero3-fp32-w2": "passed",
    }
    assert both.unreached == ["t.py::S::test[zero2-fp32-w2:names]"]
    run = both.session
    assert run["versions"] == {"torch": "2.12.0 | 2.13.0", "accelerate": "1.14.0 | none"}
    assert run["runs"] == 6
    assert run["seconds"] == 3.0
    assert run["ending"] == "interrupted"
    assert len(run["merged"]) == 2
    assert both.rows[0].runs == ["1/one", "2/one"]


def shard(number: int, *plan: list[str]) -> Report:
    report = made(**{f"ddp_{number}": "passed"})
    report.session |= {"shard": {"number": number, "plan": list(plan)}, "ending": "finished"}
    return report


def test_merge_says_which_shard_is_missing(write: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plan: list[list[str]] = [["t.py::S[a]"], ["t.py::S[b]", "test_c.py"], []]
    first = write("1.json", shard(1, *plan))
    second = write("2.json", shard(2, *plan))
    out = str(tmp_path / "out.json")
    markdown = tmp_path / "out.md"
    html = tmp_path / "out.html"
    # The third has no tests, so that nothing is missing without its report.
    assert main(["merge", second, first, "-o", out]) == 0
    assert Report.read(Path(out)).session["ending"] == "finished"
    capsys.readouterr()
    assert main(["merge", first, "-o", out, "-o", str(markdown), "-o", str(html)]) == 1
    line = "shard 2/3 is missing: t.py::S[b], test_c.py"
    assert capsys.readouterr().out == f"1 selected, 1 ran, 0 skipped: 1 passed; {line}\n"
    merged = Report.read(Path(out))
    assert merged.session["missing"] == [line]
    assert merged.session["ending"] == "stopped"
    assert_fits_schema(Path(out))
    assert "shard 2/3 is missing: t.py::S\\[b\\]" in markdown.read_text(encoding="utf-8")
    assert line in html.read_text(encoding="utf-8")
    # Only merge fails for it; and it is still missing when that report is merged with others.
    assert main(["report", out, "-o", str(tmp_path / "again.md")]) == 0
    assert main(["merge", out, second, "-o", str(tmp_path / "more.json")]) == 1


def test_merge_says_that_shards_divided_the_tests_otherwise(
    write: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = str(tmp_path / "out.json")
    first = write("1.json", shard(1, ["a.py"], ["b.py"]))
    second = write("2.json", shard(2, ["b.py"], ["a.py"]))
    assert main(["merge", first, second, "-o", out]) == 1
    _, *problems = capsys.readouterr().out.strip().split("; ")
    assert problems == [
        "shard 2/2 is missing: b.py",
        "shard 1/2 is missing: b.py",
        "the shards divided the tests in different ways",
        "expected the same tests and baseline for all",
    ]
    # Two complete sessions, of other versions perhaps, may differ.
    third = write("3.json", shard(2, ["a.py"], ["b.py"]))
    fourth = write("4.json", shard(1, ["b.py"], ["a.py"]))
    assert main(["merge", first, second, third, fourth, "-o", out]) == 0


def test_a_merged_report_is_as_the_schema_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "both.json"
    html = tmp_path / "both.html"
    assert main(["merge", str(REAL), str(REAL), "-o", str(out), "-o", str(html)]) == 0
    assert_fits_schema(out)
    data = read_json(out)
    real = Report.read(REAL)
    for result, expected in zip(data["results"], real.results, strict=True):
        assert result["nodeid"] == expected.nodeid
        assert result["status"] == expected.status
    runs = {run["id"] for run in data["runs"]}
    runs_of_cells: set[str] = set()
    for cell in data["cells"]:
        runs_of_cells.update(cell["runs"])
    assert runs_of_cells == runs
    assert len(data["runs"]) == 2 * len(real.runs)
    assert "<title>Distributed compatibility: 49 failed" in html.read_text(encoding="utf-8")
    assert capsys.readouterr().out.startswith("96 selected, 94 ran, 2 skipped: ")


def test_a_report_in_other_formats(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("out.md", "out.html", "out.txt", "out.json")]
    arguments = ["report", str(REAL)]
    for path in paths:
        arguments += ["-o", str(path)]
    assert main(arguments) == 0
    for path in paths:
        assert path.stat().st_size
    # As data: a whole number in a field of real numbers is written as one.
    assert read_json(tmp_path / "out.json") == read_json(REAL)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["diff", "none.json", str(REAL)], "none.json: "),
        (["diff", str(REAL), str(ROOT / "pyproject.toml")], "pyproject.toml: "),
        (["merge", str(REAL), "-o", "out.xml"], "the suffix says the format. Known: .json, .md, .html, .txt"),
        (["merge", str(REAL), "-o", "no_such_folder/out.md"], "no_such_folder/out.md: "),
        (["merge", str(REAL)], "required: -o/--output"),
    ],
)
def test_a_wrong_file_gives_exit_code_2(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: object = main(arguments)
    except SystemExit as end:
        code = end.code
    assert code == 2
    assert expected in capsys.readouterr().err


def test_the_command_is_installed_and_imports_neither_pytest_nor_torch() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert '[project.scripts]\ndistcompat = "pytest_distcompat.cli:main"\n' in project
    script = (
        "import sys\nfrom pytest_distcompat.cli import main\n"
        f"assert main(['diff', {str(REAL)!r}, {str(REAL)!r}]) == 0\n"
        "heavy = {'pytest', '_pytest', 'torch', 'numpy'} & set(sys.modules)\nassert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
