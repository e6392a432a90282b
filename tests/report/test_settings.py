"""The table setting x strategy of sessions that ran settings."""

from __future__ import annotations

from pathlib import Path

from pytest_distcompat.report.document import Report
from pytest_distcompat.report.settings import settings_tables
from pytest_distcompat.report.text import settings_text
from pytest_distcompat.report.write import write_report
from pytest_distcompat.status import Status, Verdict


def result(strategy: str, setting: str, status: Status = Status.PASSED, why: str = "") -> Verdict:
    cell = f"{strategy}-fp32-w2-model_mlp-set_{setting}"
    message, reason = (why, "") if status.red else ("", why)
    return Verdict("names", cell, status, message, reason, suite="S", driver="d", nodeid=f"t.py::S::test[{cell}:names]")


RESULTS = [
    result("ddp", "A.flag=true"),
    result("ddp", "A.flag=false", Status.REFUSED, "flag must be true"),
    result("zero2", "A.flag=true", Status.FAILED, "it has *no* effect"),
    result("zero2", "A.flag=false", Status.KNOWN, "org/repo#1"),
    result("zero2", "A.size=1+B.size=2"),
    Verdict("names", "ddp-fp32-w2", Status.FAILED, "of no setting", suite="S", driver="d", nodeid="t.py::S::test[x]"),
]


def test_a_setting_has_its_worst_verdict_under_each_strategy() -> None:
    (table,) = settings_tables(RESULTS)
    assert (table.cells, table.checks) == (("A.flag", "A.size + B.size"), ("ddp", "zero2"))
    words = {key: table.word(*key) for key in (("A.flag", "ddp"), ("A.flag", "zero2"), ("A.size + B.size", "ddp"))}
    assert list(words.values()) == ["refused", "FAIL", ""]
    assert table.word("A.size + B.size", "zero2") == "ok"


def test_a_session_without_settings_has_no_such_table(tmp_path: Path) -> None:
    assert settings_tables(RESULTS[-1:]) == []
    for suffix in (".md", ".html"):
        write_report(tmp_path / f"r{suffix}", Report(results=RESULTS[-1:]))
        assert "Settings" not in (tmp_path / f"r{suffix}").read_text(encoding="utf-8")


def test_the_terminal_lists_the_settings_that_fail_and_then_those_that_are_refused() -> None:
    more = [result("ddp", f"A.field{number}=1", Status.REFUSED, "no") for number in range(12)]
    lines = []
    for line in settings_text([*more, *RESULTS]):
        lines.append("".join(text for text, _ in line))
    assert lines[0] == "S (driver d): 13 of 14 settings fail or are refused"
    assert lines[1:3] == ["  A.flag     ddp refused  zero2 FAIL", "  A.field0   ddp refused"]
    assert lines[-1] == "  and 1 more, which the HTML and Markdown reports have"
    assert len(lines) == 14


def test_the_terminal_says_nothing_of_settings_that_are_accepted_or_known_to_fail() -> None:
    assert list(settings_text([RESULTS[0], RESULTS[3], RESULTS[4]])) == []


def test_markdown_has_the_table_and_the_reasons_below_it(tmp_path: Path) -> None:
    write_report(tmp_path / "r.md", Report(results=RESULTS))
    text = (tmp_path / "r.md").read_text(encoding="utf-8")
    part = text.partition("## Settings of S (driver d)\n")[2].partition("\n## ")[0]
    assert "|  | ddp | zero2 |\n| --- | --- | --- |\n| A.flag | refused | FAIL |\n| A.size + B.size |  | ok |\n" in part
    assert "- refused: flag must be true (ddp-fp32-w2-model_mlp-set_A.flag=false:names)" in part


def test_the_page_links_each_verdict_to_its_cell_with_the_reason(tmp_path: Path) -> None:
    write_report(tmp_path / "r.html", Report(results=RESULTS))
    text = (tmp_path / "r.html").read_text(encoding="utf-8")
    part = text.partition('<table class="settings">')[2].partition("</table>")[0]
    assert 'title="flag must be true">refused</a>' in part
    assert 'title="it has *no* effect">FAIL</a>' in part
    assert "#cell=t.py%3A%3AS%3Addp-fp32-w2-model_mlp-set_A.flag%3Dfalse%3Anames" in part
