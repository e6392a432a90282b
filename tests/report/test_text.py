"""The terminal's section: blocks that fit, causes, counts, colours."""

from __future__ import annotations

import dataclasses
import io
import itertools
import re
import string
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest

from pytest_distcompat.plugin.reporting.summary import MARKUP, show
from pytest_distcompat.report.causes import causes, rank_of_cause
from pytest_distcompat.report.document import Report
from pytest_distcompat.report.result import Row
from pytest_distcompat.report.text import Line, causes_text, counts_text, matrix_text, runs_text
from pytest_distcompat.report.write import append_summary, write_report
from pytest_distcompat.status import Status, Verdict, all_statuses

if TYPE_CHECKING:
    from .conftest import Session


def plain_text(line: Line) -> str:
    """The line without its styles."""
    return "".join(text for text, _ in line)


def plain_lines(lines: Iterable[Line]) -> list[str]:
    return [plain_text(line) for line in lines]


def result(cell: str, check: str, status: str = "passed", message: str = "", reproduce: str = "") -> Verdict:
    nodeid = f"t.py::S::test[{cell}:{check}]"
    verdict = Verdict(check, cell, Status.from_name(status), message, suite="S", driver="d")
    return dataclasses.replace(verdict, nodeid=nodeid, reproduce=reproduce)


def test_a_wide_matrix_goes_on_in_further_blocks(real: Report) -> None:
    width = 80
    lines = plain_lines(matrix_text(real.results, width=width))
    is_known = [line.startswith("  known: ") for line in lines]
    matrix = lines[1 : is_known.index(True)]
    assert max(map(len, matrix)) <= width
    headers = [line.split() for line in matrix if line.startswith(" " * 20)]
    assert len(headers) > 1
    wide = plain_lines(matrix_text(real.results))[1].split()
    assert list(itertools.chain(*headers)) == wide
    # Every verdict stands under its check.
    words: dict[tuple[str, str], str] = {}
    header = ""
    for line in matrix:
        if line.startswith(" " * 20):
            header = line
            continue
        for check in header.split():
            # With a space behind the last check too.
            column = f"{header} ".index(f" {check} ") + 1
            cell = line.split()[0]
            word = line[column:].split(" ")[0]
            if word:
                words[cell, check] = word
    assert words == {(result.cell, result.check): result.status.word for result in real.results}


def test_a_narrow_terminal_shows_one_column_at_least() -> None:
    results = [result("ddp-fp32-w2", "active"), result("ddp-fp32-w2", "names")]
    lines = plain_lines(matrix_text(results, width=5))
    words = [line.split() for line in lines[1:]]
    assert words == [["active"], ["ddp-fp32-w2", "ok"], ["names"], ["ddp-fp32-w2", "ok"]]


def test_red_words_alone_are_in_capitals() -> None:
    for status in all_statuses():
        assert status.word.isupper() == status.red


def test_every_style_has_a_colour() -> None:
    results = []
    for size, status in enumerate(all_statuses(), 1):
        results.append(result(f"ddp-fp32-w{size}", "names", status.name))
    texts_by_style: dict[str, set[str]] = {}
    for line in matrix_text(results):
        for text, style in line:
            texts_by_style.setdefault(style, set()).add(text)
    assert texts_by_style.keys() - {""} == set(MARKUP)
    red = {status.word for status in all_statuses() if status.red}
    assert texts_by_style["bad"] == red


def test_colours_are_pytests_own(session: Session) -> None:
    runs = '{"fsdp2-fp32-w2": "wrong"}'
    coloured = session("--color=yes", runs=runs).stdout
    plainly = session("--color=no", runs=runs).stdout
    assert "\x1b[31m\x1b[1mFAIL\x1b[0m" in coloured
    assert "\x1b[" not in plainly
    assert "FAIL" in plainly


def test_a_failed_run_is_one_cause_for_all_its_checks() -> None:
    checks = ("active", "names", "dtypes", "data", "units", "paths", "export")
    results = []
    for check in checks:
        message = f"rank 1 was killed by SIGKILL\n{check}"
        results.append(result("fsdp2-fp32-w2", check, "crashed", message))
    results += [
        result("zero3-fp32-w2", "names", "crashed", "rank 0 was killed by SIGKILL", reproduce="pytest x"),
        result("ddp-fp32-w2", "names", "failed", "rank 0: layer 3 is wrong"),
        result("ddp-fp32-w2", "data", "passed"),
        result("ddp-fp32-w2", "dtypes", "known", "rank 0 was killed by SIGKILL"),
    ]
    grouped = causes(results)
    assert [len(cause.results) for cause in grouped] == [8, 1]
    assert plain_lines(causes_text(results)) == [
        "failures by cause",
        "  1. CRASH 8 verdicts in 2 cells: rank 1 was killed by SIGKILL",
        "     fsdp2-fp32-w2 (d): active, names, dtypes, data, units, paths and 1 more; zero3-fp32-w2 (d): names",
        "     reproduce: pytest x",
        "  2. FAIL 1 verdict in 1 cell: rank 0: layer 3 is wrong",
        "     ddp-fp32-w2 (d): names",
    ]


def found_in_a_run(cell: str, check: str, message: str) -> Verdict:
    return dataclasses.replace(result(cell, check, "failed", message), ended_run="train")


def test_a_finding_comes_before_a_later_exception() -> None:
    error = "rank 1 raised KeyError: 0"
    finding = "rank 0: 12 of 12 tensors in the optimizer are stale"
    results = [
        found_in_a_run("fsdp2-fp32-w2", "names", error),
        found_in_a_run("fsdp2-fp32-w2", "resume", error),
        found_in_a_run("fsdp2-fp32-w2", "export", error),
        result("fsdp2-fp32-w2", "optimizer", "failed", finding),
        found_in_a_run("ddp-fp32-w2", "names", "rank 0 raised ValueError: no"),
    ]
    assert [(cause.headline, cause.follows) for cause in causes(results)] == [
        (finding, None),
        (error, 1),
        ("rank 0 raised ValueError: no", None),
    ]
    lines = plain_lines(causes_text(results))
    assert f"  2. FAIL 3 verdicts in 1 cell, may follow from 1: {error}" in lines


def test_findings_of_one_kind_are_one_cause_and_exceptions_of_two_names_are_two() -> None:
    message = "'{}' is not in the optimizer"
    findings = [
        result("ddp-fp32-w1", "optimizer", "failed", message.format(1)),
        result("ddp-fp32-w2", "optimizer", "failed", message.format(2)),
    ]
    assert len(causes(findings)) == 1
    exceptions = [
        found_in_a_run("ddp-fp32-w2", "a", "rank 0 raised KeyError: 'a'"),
        found_in_a_run("ddp-fp32-w2", "b", "rank 0 raised KeyError: 'b'"),
    ]
    assert len(causes(exceptions)) == 2


def test_equal_messages_of_two_drivers_are_two_causes() -> None:
    failure = result("ddp-fp32-w2", "clipping", "failed", "step 1: the norm is 0.5")
    nodeid = "t.py::T::test[ddp-fp32-w2:clipping]"
    other = dataclasses.replace(failure, suite="T", driver="e", nodeid=nodeid)
    first, second = causes([failure, other])
    assert [result.suite for result in first.results] == ["S"]
    assert [result.suite for result in second.results] == ["T"]


def test_no_reason_is_given_for_a_failure_that_is_not_declared() -> None:
    """The reason of a declared issue that does not explain the failure misleads, in a comparison most of all."""
    verdict = result("ddp-fp32-w2", "names", "failed", "key 'a' is missing")
    failure = dataclasses.replace(verdict, reason="org/repo#1")
    assert failure.why == "key 'a' is missing"


#: How torch.distributed.checkpoint reports other ranks' exceptions.
OF_RANKS = """Traceback (most recent call last): (RANK 0)
  File 'x.py', line 1, in f
    g()
RuntimeError: no key.

--- rank 1 ---
ValueError: another"""


@pytest.mark.parametrize(
    ("message", "headline"),
    [
        (
            "rank 1 raised RuntimeError: Error(s) in loading state_dict for Net:\n\tMissing key(s): a.\n\tUnexpected: b.",
            "rank 1 raised RuntimeError: Error(s) in loading state_dict for Net: Missing key(s): a.",
        ),
        (
            f"rank 1 raised x.CheckpointException: ranks:[0, 1]\n{OF_RANKS}",
            "rank 1 raised x.CheckpointException: RuntimeError: no key.",
        ),
        ("rank 1 raised RuntimeError: no\n\n--- rank 1 ---\nTraceback (most recent call last):\nValueError: x", None),
        ("one finding\nanother finding", None),
    ],
)
def test_a_headline_has_the_finding(message: str, headline: str | None) -> None:
    (cause,) = causes([result("ddp-fp32-w2", "resume", "failed", message)])
    assert cause.headline == (headline or message.splitlines()[0])


def test_there_are_no_causes_where_nothing_is_red() -> None:
    passed = result("ddp-fp32-w2", "names")
    known = result("ddp-fp32-w2", "data", "known", "x")
    assert list(causes_text([passed, known])) == []


def test_a_thousand_causes_are_not_all_shown() -> None:
    words = ("one", "two", "three", "four", "five")
    results = []
    for first, second in itertools.product(words, words):
        results.append(result("ddp-fp32-w2", f"{first}{second}", "failed", f"{first} {second}"))
    lines = plain_lines(causes_text(results))
    assert lines[-1] == "  and 5 more causes"


@pytest.mark.parametrize(
    ("message", "rank"),
    [
        ("rank 3 raised ValueError: no", 3),
        ("refused only at 'step', after build\n\nrank 1 raised ValueError", 1),
        ("time limit of 3 s: ranks 1, 2 still running", 1),
        ("the optimizer of no rank keeps state for 'a'", None),
        ("", None),
    ],
)
def test_the_rank_of_the_cause(message: str, rank: int | None) -> None:
    assert rank_of_cause(message) == rank


def test_counts_name_every_status(real: Report) -> None:
    assert counts_text(Report()) == "0 selected, 0 ran, 0 skipped: nothing"
    line = counts_text(real)
    assert line.startswith("96 selected, 94 ran, 2 skipped: ")
    assert "12 crashed" in line
    assert "late" not in line


def test_the_slowest_runs_and_the_devices() -> None:
    runs = []
    for number in range(9):
        cell = f"ddp-fp32-w{number}"
        runs.append({"seconds": float(number), "cell": cell, "name": "train", "driver": "d"})
    timeline = [
        {"device": "GPU-a", "begin": 1.0, "end": 3.0},
        {"device": "GPU-b", "begin": 1.0, "end": 5.0},
    ]
    slowest = [
        "8.0 s ddp-fp32-w8 train (d)",
        "7.0 s ddp-fp32-w7 train (d)",
        "6.0 s ddp-fp32-w6 train (d)",
        "5.0 s ddp-fp32-w5 train (d)",
        "4.0 s ddp-fp32-w4 train (d)",
    ]
    assert plain_lines(runs_text(runs, timeline)) == [
        f"slowest runs: {', '.join(slowest)}",
        "devices in use, of 4 s: GPU-a 50%, GPU-b 100%",
    ]


def test_a_chat_message_is_short(real: Report, tmp_path: Path) -> None:
    real.results = []
    for number in range(1, 200):
        letter = string.ascii_lowercase[number % 26]
        message = "x" * 5000 + " " + letter * (number + 1)
        real.results.append(result(f"fsdp2-fp32-w{number}", "names", "failed", message))
    write_report(tmp_path / "chat.txt", real)
    text = (tmp_path / "chat.txt").read_text(encoding="utf-8")
    assert len(text) < 3000
    assert text.startswith("Distributed compatibility: 199 failed\n199 selected, 199 ran")
    assert "more causes" in text


def test_a_chat_message_of_a_real_run_names_cause_cell_and_command(real: Report, tmp_path: Path) -> None:
    write_report(tmp_path / "chat.txt", real)
    text = (tmp_path / "chat.txt").read_text(encoding="utf-8")
    assert len(text) < 3000
    assert "CRASH x 12: rank 1 was killed by SIGKILL" in text
    assert "pytest 'faulty_suite.py::TestFaulty::test[ddp-bf16_upcast-w2:active]'" in text


def test_markdown_escapes_markup(tmp_path: Path) -> None:
    hostile = "rank 0: <img src=x onerror=alert(1)> | `code` *bold* [link](http://x) _x_ my_name"
    failure = result("ddp-fp32-w2", "names", "failed", hostile)
    write_report(tmp_path / "r.md", Report(results=[failure]))
    text = (tmp_path / "r.md").read_text(encoding="utf-8")
    escaped = "rank 0: \\<img src=x onerror=alert(1)\\> \\| \\`code\\` \\*bold\\* \\[link\\](http://x) \\_x\\_ my_name"
    assert f"1. **FAIL**, 1 verdicts: {escaped}" in text
    assert "<img" not in text.replace("\\<img", "")


#: What a test could put into its names and messages to have a terminal, or a page, do something.
HOSTILE = "\x1b[2J\x1b]0;title\x07 \x9b31m \u202e |pipe| `tick` <b>&lt;</b> ~~x~~\r\n# title\n| --- | \ud800"


def hostile_report() -> Report:
    """Whatever a test can name or say is hostile."""
    texts: dict[str, Any] = dict.fromkeys(
        ("suite", "driver", "cell", "check", "message", "reason", "reproduce"), HOSTILE
    )
    nodeid = f"{HOSTILE}::test[x]"
    verdicts = [
        Verdict(status=Status.FAILED, nodeid=nodeid, **texts),
        Verdict(status=Status.KNOWN, nodeid=nodeid, **texts),
    ]
    cost: dict[str, float | None] = {
        "step_seconds": 0.1,
        "tokens_per_second": 1.0,
        "state_bytes": 2.0,
        "memory": 3.0,
    }
    row = Row(HOSTILE, HOSTILE, HOSTILE, not_applicable={HOSTILE: HOSTILE}, cost=cost)
    session = {
        "versions": {HOSTILE: HOSTILE},
        "device": HOSTILE,
        "baseline": {"file": HOSTILE, "text": [HOSTILE]},
    }
    return Report(session, verdicts, [row])


def categories_of(text: str) -> set[str]:
    """Return the kinds of characters in a text, the ends of lines aside."""
    return {unicodedata.category(character) for character in text.replace("\n", "")}


@pytest.mark.parametrize("suffix", [".md", ".txt"])
def test_no_name_and_no_message_does_anything_to_a_terminal(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"r{suffix}"
    write_report(path, hostile_report())
    text = path.read_text(encoding="utf-8")
    assert categories_of(text).isdisjoint({"Cc", "Cf"})
    assert "x1b[2J" in text.replace("\\", "")


def test_no_name_and_no_message_is_markup_in_markdown(tmp_path: Path) -> None:
    write_report(tmp_path / "r.md", hostile_report())
    lines = (tmp_path / "r.md").read_text(encoding="utf-8").splitlines()
    code = [line for line in lines if line.startswith("   $ ")]
    prose = [line for line in lines if line not in code]
    # Of a matrix, and of the cost: the head, the line below it, and a row.
    tables = [len(re.findall(r"(?<!\\)\|", line)) for line in prose if line.startswith("|")]
    assert tables == [3, 3, 3, 7, 7, 7]
    for line in prose:
        if not line.startswith("|"):
            assert not re.search(r"(?<!\\)[|<>`&~\[]", line.replace("```", ""))
    for line in lines:
        if line.startswith("#") and "title" in line:
            assert line.startswith("## ")


def shown(report: Report, written: Sequence[str] = (), *, verbosity: int = 0) -> str:
    """The summary of a session."""
    text = io.StringIO()
    terminal = Mock(isatty=False)
    # No extension adds lines.
    terminal.config.hook.pytest_distcompat_summary.return_value = []
    terminal.config.get_verbosity.return_value = verbosity
    terminal.write.side_effect = lambda part, **markup: text.write(part)
    terminal.write_line.side_effect = lambda line, **markup: text.write(f"{line}\n")
    show(terminal, report, written)
    return text.getvalue()


@pytest.mark.parametrize("verbosity", [0, 1])
def test_only_a_verbose_summary_has_the_devices(verbosity: int) -> None:
    timeline = [{"device": "GPU-a", "begin": 1.0, "end": 3.0}]
    gaps = [{"device": "GPU-a", "begin": 3.0, "end": 9.0, "why": "pytest runs other tests"}]
    report = Report({"runs": 1, "timeline": timeline, "gaps": gaps})
    text = shown(report, verbosity=verbosity)
    assert ("devices in use" in text) == bool(verbosity)
    assert ("devices not in use" in text) == bool(verbosity)


def test_the_summary_of_a_session_is_escaped_too() -> None:
    text = shown(hostile_report(), [f"report: {HOSTILE}"], verbosity=1)
    assert categories_of(text).isdisjoint({"Cc", "Cf", "Cs"})
    assert text.count("\\x1b[2J") > 5


def test_a_steps_summary_that_is_full_says_so(real: Report, tmp_path: Path) -> None:
    path = tmp_path / "summary"
    path.write_text("x" * (1024 * 1024 - 1500), encoding="utf-8")
    append_summary(path, real)
    assert path.stat().st_size <= 1024 * 1024
    assert path.read_text(encoding="utf-8").endswith("The rest does not fit here: see the report's file.\n")
