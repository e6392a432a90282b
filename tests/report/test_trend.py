"""``distcompat trend``: what is broken, flaky or fixed over many nights, and its page."""

from __future__ import annotations

import dataclasses
import random
import re
import time
from pathlib import Path
from typing import Any

import pytest

from pytest_distcompat.cli import main
from pytest_distcompat.report.document import Report
from pytest_distcompat.report.history import History
from pytest_distcompat.report.html import sparkline, trend_html
from pytest_distcompat.report.result import Row
from pytest_distcompat.report.trend import Trend, trend
from pytest_distcompat.status import Status, Verdict

from .conftest import NO_BROWSER
from .test_escaping import HOSTILE

#: The letters of hand-made histories; a dot is a night without the item.
LETTERS = {"o": "passed", "k": "known", "-": "skipped", "F": "failed", "C": "crashed", "?": "fixed?"}


def night(at: int, verdicts: dict[str, str], torch: str = "2.12.0", **more: Any) -> Report:
    """The report of one night: a letter for each check of one cell."""
    results = []
    for check, letter in verdicts.items():
        if letter == ".":
            continue
        message = ""
        if letter in "FC":
            message = f"rank {at}: is wrong"
        verdict = Verdict(
            check,
            "ddp-fp32-w2",
            Status.from_name(LETTERS[letter]),
            message,
            suite="S",
            driver="d",
            nodeid=f"t.py::S::test[ddp-fp32-w2:{check}]",
            seconds=at + 1.0,
        )
        results.append(verdict)
    session = {
        "began": f"2026-11-{at + 1:02}T01:30:00Z",
        "seconds": 60.0,
        "versions": {"python": "3.11.7", "torch": torch},
        "device": "cpu",
    }
    rows = []
    if results:
        rows.append(Row("S", "d", "ddp-fp32-w2", "t.py::S", memory=[1000 * at, 10]))
    return Report({**session, **more}, results, rows)


def nights(torch: str = "", **histories: str) -> list[Report]:
    """A report for each letter of the histories; a letter of ``torch`` is the minor version of its night."""
    count = len(next(iter(histories.values())))
    minor_versions = torch or "1" * count
    reports = []
    for at in range(count):
        verdicts = {check: letters[at] for check, letters in histories.items()}
        reports.append(night(at, verdicts, f"2.{minor_versions[at]}"))
    return reports


def history(letters: str, torch: str = "") -> History:
    """The one history of these letters."""
    (check_history,) = trend(nights(torch, names=letters)).histories
    return check_history


@pytest.mark.parametrize(
    ("letters", "torch", "kind"),
    [
        ("oooFF", "11122", "broken"),
        ("oooFF", "11111", "broken"),
        ("ooo??", "11111", "broken"),
        ("FFF", "111", "broken"),
        ("ooFFo", "11223", "fixed"),
        ("FFk", "112", "fixed"),
        ("ooFFoo", "112211", "fixed"),
        ("oFo", "111", "flaky"),
        ("oFoF", "1111", "flaky"),
        ("FoC", "111", "flaky"),
        # Other versions between the nights do not hide it.
        ("ooFoo", "12121", "flaky"),
        ("oFFoo", "12111", "flaky"),
        # Flaky once, broken by a later release.
        ("oFoFF", "11122", "broken"),
        ("oko", "111", "never red"),
        ("-.-", "111", "never run"),
    ],
)
def test_the_kind_of_a_history(letters: str, torch: str, kind: str) -> None:
    assert history(letters, torch).kind == kind


@pytest.mark.parametrize(
    ("letters", "kind", "nights_of"),
    [
        # A gap, or a skip, is no fix: it is red since before, and found once.
        ("oF.F", "broken", (0, 1, None)),
        ("oF-F", "broken", (0, 1, None)),
        ("oF..", "broken", (0, 1, None)),
        ("F.o", "fixed", (None, 0, 2)),
        # Nobody knows which of these nights broke it: the last known good one is named.
        ("o..F", "broken", (0, 3, None)),
    ],
)
def test_a_gap_is_neither_red_nor_a_fix(letters: str, kind: str, nights_of: tuple[int | None, ...]) -> None:
    check_history = history(letters)
    assert check_history.kind == kind
    assert (check_history.before, check_history.since, check_history.until) == nights_of
    history_of_nights = trend(nights(names=letters))
    good_after_bad = letters.count("o", letters.index("F"))
    assert sum(night.fixed for night in history_of_nights.nights) == good_after_bad
    assert sum(night.found for night in history_of_nights.nights) == (letters[0] == "o")


def test_the_versions_that_changed_are_named_over_a_gap() -> None:
    history_of_nights = trend(nights("12345", names="oo..F", units="ooFFF"))
    names, units = history_of_nights.histories
    assert names.changed == {"torch": ("2.2", "2.5")}
    assert units.changed == {"torch": ("2.2", "2.3")}
    assert history_of_nights.story(names) == (
        "broken: red since 2026-11-05 01:30, not on 2026-11-02 01:30: torch 2.2 -> 2.5"
    )
    first, second, *_ = history_of_nights.nights
    assert first.changed == {}
    assert second.changed == {"torch": ("2.1", "2.2")}


def test_another_gpu_is_another_version() -> None:
    reports = [
        night(0, {"names": "o"}, gpu="H100"),
        night(1, {"names": "F"}, gpu="L4"),
        night(2, {"names": "o"}, gpu="H100"),
    ]
    (check_history,) = trend(reports).histories
    assert check_history.kind == "fixed"
    assert check_history.changed == {"gpu": ("H100", "L4")}


def test_nights_are_in_the_order_in_which_they_began_with_their_counts() -> None:
    reports = nights("1112", names="oFFo", units="ooF-", data="FFoo")
    shuffled = random.Random(0).sample(reports, k=4)
    history_of_nights = trend(shuffled)
    all_nights = history_of_nights.nights
    assert [str(night) for night in all_nights] == [
        "2026-11-01 01:30",
        "2026-11-02 01:30",
        "2026-11-03 01:30",
        "2026-11-04 01:30",
    ]
    assert [night.ran for night in all_nights] == [3, 3, 3, 2]
    assert [night.red for night in all_nights] == [1, 2, 2, 0]
    assert [night.found for night in all_nights] == [0, 1, 1, 0]
    assert [night.fixed for night in all_nights] == [0, 0, 1, 1]
    assert history_of_nights.headline == "4 nights: 1 broken, 2 fixed; 1 not run in the last"


def test_of_several_verdicts_of_a_night_the_worst_counts() -> None:
    night_report = night(0, {"names": "o"})
    night_report.results += night(1, {"names": "F"}).results
    history_of_nights = trend([night_report])
    assert history_of_nights.histories[0].statuses == (Status.FAILED,)
    assert history_of_nights.headline == "1 night: 1 broken"


def test_seconds_and_memory_of_a_cell() -> None:
    costs = trend(nights(names="o.o-", units="o.o-")).costs
    assert list(costs) == ["t.py::S[ddp-fp32-w2]"]
    seconds, memory = costs["t.py::S[ddp-fp32-w2]"]
    assert memory == [10, None, 2000, None]
    assert seconds == [2.0, None, 6.0, None], "what was skipped took no time"
    # A dot, then a line.
    assert sparkline([1.0, None, 2.0, 0.0]) == "M5 12.0h0M25 2.0h0L35 22.0h0"


def test_the_text_has_one_line_for_each_change() -> None:
    reports = nights("1122", names="ooFF", units="ooFF", data="oFoo", paths="oooo", memory="oFFo")
    history_of_nights = trend(reports)
    first, *lines = history_of_nights.lines()
    assert first == "4 nights: 2 broken, 2 fixed, 1 never red"
    broken = "broken: red since 2026-11-03 01:30, not on 2026-11-02 01:30: torch 2.1 -> 2.2: "
    assert lines[0] == f"{broken}ddp-fp32-w2:names (d), ddp-fp32-w2:units (d): FAIL: rank 3: is wrong"
    assert len(lines) == 3
    begun = "was red since 2026-11-02 01:30, not on 2026-11-01 01:30: no version changed: ddp-fp32-w2"
    assert lines[1].startswith(f"fixed on 2026-11-03 01:30: torch 2.1 -> 2.2; {begun}:data")
    assert lines[2].startswith(f"fixed on 2026-11-04 01:30: no version changed; {begun}:memory")
    # Each is broken since another night.
    letters = {}
    for night_number in range(1, 25):
        letters[f"check_{night_number}"] = "o" * night_number + "F" * (25 - night_number)
    long = trend(nights(**letters))
    lines = list(long.lines())
    assert len(lines) == 22
    assert lines[-1] == "and 4 more causes"


def rows(page: str) -> dict[str, str]:
    """The rows of the page's strips, by check."""
    matches = re.findall(r"<tr data-kind=.*?</tr>", page, re.DOTALL)
    return {re.findall(r"ddp-fp32-w2:(\w+)", row)[0]: row for row in matches}


def strip(row: str) -> list[tuple[int, str, str]]:
    """The nights, the style and the title of each stretch of a strip."""
    segments = re.findall(r'<i style="flex:(\d+)" class="(\w+)" title="([^"]*)"', row)
    return [(int(count), style, title) for count, style, title in segments]


def test_other_values_are_shown_apart_with_the_versions_that_changed() -> None:
    """Also over a night that does not know them; where every verdict holds they are news."""
    reports = nights("111223", names="oooooo")
    for report, digest in zip(reports, "aa-bb-", strict=True):
        if digest == "-":
            report.rows[0].values = {}
        else:
            report.rows[0].values = {"digests": {"build parameter": digest}}
    trends = trend(reports)
    text = "other values since 2026-11-04 01:30, torch 2.1 -> 2.2: ddp-fp32-w2 (d)"
    assert [trends.turn_text(turn) for turn in trends.value_turns] == [text]
    assert list(trends.lines()) == ["6 nights: 1 never red", text]
    assert text.replace(">", "&gt;") in trend_html(trends)
    assert "Other values" not in trend_html(trend(nights(names="oo")))


def test_the_page_has_what_the_data_has() -> None:
    history_of_nights = trend(nights("11122", names="oooFF", units="oF.Fo", paths="ooooo", memory="ok-oo"))
    page = trend_html(history_of_nights)
    table_rows = rows(page)
    assert list(table_rows) == ["names", "units"], "what was never red has no row"
    assert "<summary>2 never red</summary>" in page
    assert strip(table_rows["names"]) == [
        (3, "good", "ok: 2026-11-01 01:30 to 2026-11-03 01:30"),
        (2, "bad", "FAIL: 2026-11-04 01:30 to 2026-11-05 01:30"),
    ]
    units = [(count, style) for count, style, _ in strip(table_rows["units"])]
    assert units == [
        (1, "good"),
        (1, "bad"),
        (1, "none"),
        (1, "bad"),
        (1, "good"),
    ]
    for history in history_of_nights.histories[:2]:
        story = history_of_nights.story(history)
        assert story.replace(">", "&gt;") in table_rows[history.last.check]
    for night in history_of_nights.nights:
        values = (night.seconds, night.ran, night.red, night.found, night.fixed)
        cells = "".join(f"<td>{value}</td>" for value in values)
        assert f'<tr><th scope="row">{night}</th>{cells}' in page
    ((seconds, memory),) = history_of_nights.costs.values()
    last = seconds[-1]
    cell_of_seconds = f"<td>{last} s, largest {last} s</td>"
    assert f'<path d="{sparkline(seconds)}"/></svg></td>{cell_of_seconds}' in page
    cell_of_memory = "<td>3.9 KiB, largest 3.9 KiB</td>"
    assert f'<path d="{sparkline(memory)}"/></svg></td>{cell_of_memory}' in page


def hostile() -> Trend:
    """A trend whose every text is a script."""
    reports = nights(names="oF")
    for report in reports:
        texts: dict[str, Any] = dict.fromkeys(("check", "cell", "suite", "driver", "reason", "message"), HOSTILE)
        report.results = [
            dataclasses.replace(result, **texts, nodeid=f"{HOSTILE}::test[x]") for result in report.results
        ]
        report.session["versions"] = {HOSTILE: f"{HOSTILE}{report.session['began']}"}
        report.session["began"] += HOSTILE
    return trend(reports)


def test_no_text_of_a_report_is_markup() -> None:
    page = trend_html(hostile())
    assert page.count("<script>") == 1
    assert "<img" not in page
    assert "&lt;script&gt;window.hit=1" in page


@NO_BROWSER
def test_the_browser_runs_its_filters_and_nothing_else(browser: Any, tmp_path: Path) -> None:
    from playwright.sync_api import expect

    path = tmp_path / "trend.html"
    path.write_text(trend_html(hostile()), encoding="utf-8")
    page = browser.new_page()
    page.goto(f"file://{path}")
    assert page.evaluate("[window.hit === undefined, document.scripts.length, document.images.length]") == [True, 1, 0]
    path.write_text(trend_html(trend(nights(names="oFF", units="oFo"))), encoding="utf-8")
    page.goto(f"file://{path}")
    shown = page.locator("tr[data-kind]:not([hidden])")
    assert shown.count() == 2
    page.select_option("[name=kind]", "flaky")
    expect(shown).to_have_count(1)
    assert shown.all_text_contents()[0].strip().startswith("ddp-fp32-w2:units")
    page.fill("[name=text]", "NAMES")
    expect(shown).to_have_count(0)
    page.click("[type=reset]")
    expect(shown).to_have_count(2)
    page.close()


def write(directory: Path, reports: list[Report]) -> None:
    for at, report in enumerate(reports):
        # In the wrong order, each in a folder of its own as a workflow's artifacts are.
        path = directory / f"{9 - at}" / "report.json"
        path.parent.mkdir(parents=True)
        path.write_text(report.to_text(), encoding="utf-8")


def test_the_command_writes_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    reports = nights("122", names="oFF", data="oo.")
    write(tmp_path / "nights", reports)
    (tmp_path / "nights" / "last.json").write_text(night(3, {"names": "F"}, "2.2").to_text(), encoding="utf-8")
    (tmp_path / "nights" / "report.html").write_text("<p>not read</p>", encoding="utf-8")
    assert main(["trend", "nights"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "4 nights: 1 broken, 1 never red; 1 not run in the last"
    assert "red since 2026-11-02 01:30, not on 2026-11-01 01:30: torch 2.1 -> 2.2" in out[1]
    assert out[-1] == "written: trend.html"
    assert len(strip(rows(Path("trend.html").read_text(encoding="utf-8"))["names"])) == 2


def test_what_is_no_report_is_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "trend.html"
    assert main(["trend", str(tmp_path / "none"), "-o", str(output)]) == 2
    assert "none: no *.json is there" in capsys.readouterr().err
    write(tmp_path, nights(names="oo"))
    (tmp_path / "a.json").write_text("{}", encoding="utf-8")
    without_begin = night(2, {"names": "o"}, began="")
    (tmp_path / "b.json").write_text(without_begin.to_text(), encoding="utf-8")
    assert main(["trend", str(tmp_path), "-o", str(output)]) == 2
    err = capsys.readouterr().err
    assert "a.json: is no report of pytest-distcompat" in err
    assert "b.json: does not say when it began" in err
    assert not output.exists()


def test_a_hundred_thousand_verdicts_take_seconds() -> None:
    chosen = random.Random(1)
    checks = [f"check_{at}" for at in range(1000)]
    reports = []
    for at in range(100):
        letters = dict.fromkeys(checks, "o")
        for name in checks:
            if chosen.random() < 0.001:
                letters[name] = "F"
        if at > 50:
            letters["check_7"] = "F"
        month, day = divmod(at, 28)
        date = f"2026-{month + 1:02}-{day + 1:02}"
        reports.append(night(at, letters, began=f"{date}T01:00:00Z"))
    # Processor time: other sessions may share the machine.
    began = time.process_time()
    history_of_nights = trend(reports)
    page = trend_html(history_of_nights)
    assert time.process_time() - began < 10
    assert len(history_of_nights.histories) == 1000
    assert sum(night.ran for night in history_of_nights.nights) == 100_000
    red = sum(history.kind in {"broken", "flaky", "fixed"} for history in history_of_nights.histories)
    shortened = page.replace("ddp-fp32-w2:check_", "ddp-fp32-w2:c")
    assert len(rows(shortened)) == red
    assert page.count("<tr data-kind") == red
    assert len(page) < 500_000
