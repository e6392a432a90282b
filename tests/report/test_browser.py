"""The HTML page, in a real browser: matrix, filters, details, keyboard, narrow screens, contrast.

Skipped where no chromium is on the PATH.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest

from pytest_distcompat.report.document import Report
from pytest_distcompat.report.write import write_report
from pytest_distcompat.status import Status, Verdict

from .conftest import NO_BROWSER

if TYPE_CHECKING:
    from pathlib import Path

    from playwright.sync_api import Browser

pytestmark = NO_BROWSER


def test_the_matrix_is_that_of_the_report(opened: Any, real: Report) -> None:
    page = opened(real)
    assert page.page.title() == "Distributed compatibility: 49 failed"
    shown = page(
        "[...document.querySelectorAll('.matrix .verdict')].map((one) => [one.dataset.place, one.textContent])"
    )
    assert {tuple(pair) for pair in shown} == {
        (f"{result.place}:{result.cell}:{result.check}", result.status.word) for result in real.results
    }
    assert page.page.locator("#shown").text_content() == "9 of 9 cells"
    assert page.page.locator(".causes > li").count() == 9


def test_without_scripts_matrix_and_causes_are_there(browser: Browser, real: Report, tmp_path: Path) -> None:
    write_report(tmp_path / "r.html", real)
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(f"file://{tmp_path / 'r.html'}")
    assert page.locator(".verdict", has_text="CRASH").count() == 12
    assert "no filters" in str(page.locator("noscript").text_content())
    # Every tile and every check of a cause leads to a verdict, and what is known has its link.
    for link, start in ((".tile", "fsdp2-fp32-w2:active"), (".causes details[open] ul a", "ddp-fp32-w2:memory")):
        page.locator(link, has_text="HUNG" if link == ".tile" else None).click()
        assert str(page.locator(":target, :target .verdict").last.get_attribute("data-place")).endswith(start)
    targets = "[...document.querySelectorAll('.tile, .causes ul a')].every((one) => document.getElementById(decodeURIComponent(one.hash.slice(1))))"
    assert page.evaluate(targets)
    known = page.locator("#reasons-known + ul a")
    assert [element.get_attribute("href") for element in known.all()] == [
        "https://github.com/pytest-distcompat/pytest-distcompat/blob/main/docs/upstream/torch_dcp_damage_unnamed.py",
        "https://example.org/issues/1",
    ]
    context.close()


def test_filters_narrow_rows_and_columns(opened: Any, real: Report) -> None:
    page = opened(real)

    form = page.page.locator("#filters")
    form.get_by_label("Strategy").select_option("fsdp2")
    assert shown_cells(page) == ["fsdp2-fp32-w2", "fsdp2-bf16_upcast-w2", "fsdp2-fp16_mixed-w2"]
    form.get_by_label("Status").select_option("red")
    assert shown_cells(page) == ["fsdp2-fp32-w2", "fsdp2-bf16_upcast-w2"]
    form.get_by_label("Check").select_option("optimizer")
    assert shown_cells(page) == ["fsdp2-bf16_upcast-w2"]
    heads = page("[...document.querySelectorAll('.matrix thead th:not([hidden])')].map((th) => th.textContent)")
    assert heads == ["optimizer"]
    form.get_by_role("button", name="Show all").click()
    page.wait_for("document.getElementById('shown').textContent === '9 of 9 cells'")
    form.get_by_label("Cell contains").fill("fsdp1 bf16")
    assert shown_cells(page) == ["fsdp1-bf16_upcast-w2"]
    form.get_by_label("Cell contains").fill("nothing at all")
    assert shown_cells(page) == []
    assert page.page.locator("#shown").text_content() == "0 of 9 cells"


def shown_cells(page: Any) -> list[str]:
    shown: list[str] = page(
        "[...document.querySelectorAll('.matrix tbody tr:not([hidden])')].map((tr) => tr.dataset.cell)"
    )
    return shown


def test_the_address_keeps_the_filters_and_the_open_cell(opened: Any, real: Report) -> None:
    page = opened(real)
    form = page.page.locator("#filters")
    form.get_by_label("Strategy").select_option("fsdp2")
    form.get_by_label("Status").select_option("red")
    form.get_by_label("Cell contains").fill("w2 & fp32")
    assert page("location.hash") == "#text=w2+%26+fp32&strategy=fsdp2&status=red"
    form.get_by_label("Cell contains").fill("w2 fp32")
    page.verdict("fsdp2-fp32-w2:names").click()
    again = opened(real, fragment=page("location.hash"))
    assert again.page.locator("#verdict h3").inner_text() == "names: failed"
    again.page.keyboard.press("Escape")
    again.wait_for("location.hash === '#text=w2+fp32&strategy=fsdp2&status=red'")
    assert shown_cells(again) == ["fsdp2-fp32-w2"]
    assert again.page.locator("#filters").get_by_label("Cell contains").input_value() == "w2 fp32"
    assert again.page.locator("#filters").get_by_label("Status").input_value() == "red"
    again.page.get_by_role("button", name="Show all").click()
    again.wait_for("location.hash === ''")
    assert len(shown_cells(again)) == 9
    # A report without that strategy shows all of what it has.
    other = opened(real, fragment="#strategy=zero9&precision=fp32")
    assert other.page.locator("#filters").get_by_label("Strategy").input_value() == ""
    assert shown_cells(other) == ["ddp-fp32-w2", "fsdp1-fp32-w2", "fsdp2-fp32-w2", "zero1-fp32-w2"]


def test_the_overview_counts_each_driver_and_strategy_and_leads_to_its_cells(opened: Any, real: Report) -> None:
    second = [
        dataclasses.replace(
            result, driver="other", suite="TestOther", nodeid=result.nodeid.replace("TestFaulty", "TestOther")
        )
        for result in real.results
        if result.cell.startswith("ddp-fp32")
    ]
    page = opened(dataclasses.replace(real, results=[*real.results, *second]))
    heads = page.page.locator(".overview th[scope=col]").all_inner_texts()
    assert heads == ["ddp", "fsdp1", "fsdp2", "zero1"]
    rows = page.page.locator(".overview tbody tr")
    assert rows.locator("th").all_inner_texts() == ["faulty_driver:Faulty", "other"]
    tiles = [[cell.locator("span").all_inner_texts() for cell in row.locator("td").all()] for row in rows.all()]
    # The worst first; nothing is drawn where a driver has no cell.
    assert tiles[0][0] == ["12 CRASH", "1 FIXED?", "1 FAIL", "1 known", "11 ok"]
    assert tiles[0][3] == ["2 skipped"]
    assert tiles[1][1:] == [[], [], []]
    for row, driver in zip(tiles, ("faulty_driver:Faulty", "other"), strict=True):
        for strategy, counts in zip(heads, row, strict=True):
            counted = sum(int(text.split()[0]) for text in counts)
            own = [
                result
                for result in (*real.results, *second)
                if result.driver == driver and result.cell.startswith(strategy)
            ]
            assert counted == len(own)
    rows.nth(1).locator(".tile").click()
    page.wait_for("document.getElementById('shown').textContent === '1 of 10 cells'")
    assert shown_cells(page) == ["ddp-fp32-w2"]
    assert page.page.locator("#filters").get_by_label("Driver").input_value() == "other"


def test_all_suites_have_their_checks_in_the_same_order(opened: Any) -> None:
    cells = {
        "One": {"ddp-fp32-w2": "active resume export", "ddp-fp16_mixed-w2": "active scaling export"},
        "Two": {"ddp-fp32-w2": "active names export", "fsdp2-fp32-w2": "active names resume scaling"},
    }
    results = [
        Verdict(check, cell, Status.PASSED, suite=suite, driver="mine", nodeid=f"t.py::{suite}::test[{cell}:{check}]")
        for suite, checks_by_cell in cells.items()
        for cell, checks in checks_by_cell.items()
        for check in checks.split()
    ]
    page = opened(Report(results=results))
    heads = [table.locator("thead th").all_inner_texts() for table in page.page.locator(".matrix").all()]
    assert heads == [["active", "resume", "scaling", "export"], ["active", "names", "resume", "scaling", "export"]]
    filters = page.page.locator("#filters").get_by_label("Check").locator("option").all_inner_texts()
    assert filters == ["all", "active", "names", "resume", "scaling", "export"]


def test_urls_are_links_and_nothing_else_is(opened: Any, real: Report) -> None:
    failed = next(result for result in real.results if result.status == "failed")
    expected = "see (https://example.org/a?b=1&c=2), logging.info and javascript:alert(1); 'http://example.org/d'."
    page = opened(Report(results=[dataclasses.replace(failed, message=expected, reason=f"declared at {expected}")]))
    page.page.locator(".matrix .verdict").click()
    links = [(element.get_attribute("href"), element.inner_text()) for element in page.page.locator("#verdict a").all()]
    assert links == [(url, url) for url in ("https://example.org/a?b=1&c=2", "http://example.org/d")] * 2
    assert page.page.locator("#verdict pre").first.inner_text() == expected
    page.page.keyboard.press("Escape")
    known = opened(Report(results=[dataclasses.replace(failed, status=Status.KNOWN, reason=expected)]))
    assert [element.get_attribute("href") for element in known.page.locator(".reasons a").all()] == [
        links[0][0],
        links[1][0],
    ]
    assert expected in known.page.locator(".reasons li").inner_text()


@pytest.mark.parametrize("permitted", [True, False])
def test_a_button_copies_the_command(opened: Any, real: Report, permitted: bool) -> None:
    page = opened(real)
    if permitted:
        page.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    else:
        page("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    cause = page.page.locator(".causes details[open]")
    cause.get_by_role("button", name="Copy").click()
    page.wait_for("document.querySelector('.causes details[open] .copy').textContent === 'Copied'")

    def pasted() -> str:
        field = page.page.locator("#filters").get_by_label("Cell contains")
        field.fill("")
        field.focus()
        page.page.keyboard.press("Control+V")
        return str(field.input_value())

    assert pasted() == cause.locator("pre.command").text_content() != ""
    page.page.get_by_role("button", name="Show all").click()
    result = next(
        result for result in real.results if result.check == "parity" and result.cell == "fsdp1-bf16_upcast-w2"
    )
    page.verdict("fsdp1-bf16_upcast-w2:parity").click()
    # By the keyboard, and inside the dialog.
    page.page.locator("#verdict .copy").press("Enter")
    # The browser writes to the clipboard after the key press returns.
    page.wait_for("document.querySelector('#verdict .copy').textContent === 'Copied'")
    page.page.keyboard.press("Escape")
    assert pasted() == result.reproduce


def test_a_cell_shows_ranks_names_dtypes_curves_and_bars(opened: Any, real: Report) -> None:
    page = opened(real)
    page.verdict("fsdp1-bf16_upcast-w2:parity").click()
    detail = page.page.locator("#detail")
    assert detail.is_visible()
    text = detail.inner_text()
    for expected in ("step 17: the loss is", "faulty_suite.py::TestFaulty::test[fsdp1-bf16_upcast-w2:parity]", "Runs"):
        assert expected in text
    dtypes = [row.inner_text().split("\t") for row in detail.locator("table").first.locator("tbody tr").all()]
    assert ["master", "float32", "bfloat16 (differs)"] in [[" ".join(words.split()) for words in row] for row in dtypes]
    curves = page(
        "[...document.querySelectorAll('#detail figure')].map((one) => [one.querySelector('figcaption').textContent, one.querySelectorAll('.curve').length, one.querySelector('.curve.own').getAttribute('points').split(' ').length])"
    )
    assert [(title, count >= 3, steps) for title, count, steps in curves] == [
        ("Loss", True, 20),
        ("Loss: relative difference to the reference", True, 20),
        ("Gradient norm", True, 20),
        ("Gradient norm: relative difference to the reference", True, 20),
    ]
    assert detail.locator(".curve.reference").count() == 2
    assert detail.locator(".bar.own").count() == 2
    assert detail.locator(".name").count() > 0


def test_a_crashed_cell_shows_each_rank_and_the_other_verdicts(opened: Any, real: Report) -> None:
    page = opened(real)
    page.verdict("fsdp2-bf16_upcast-w2:names").click()
    detail = page.page.locator("#detail")
    ranks = [text for text in detail.locator("details details summary").all_inner_texts() if text.startswith("rank")]
    assert {rank.split(":")[0] for rank in ranks} == {"rank 0", "rank 1"}
    assert "Stack at the time limit:" in detail.locator("details[open] p").all_inner_texts()
    detail.locator(".chips button", has_text="dtypes").click()
    assert detail.locator("#verdict h3").inner_text() == "dtypes: hung"
    lines = page("new Set([...document.querySelectorAll('.chips button')].map((one) => one.offsetTop)).size")
    assert lines < detail.locator(".chips button").count() / 2, "the chips stand beside one another"
    assert detail.locator(".chips [aria-pressed='true']").inner_text() == "dtypes HUNG"


def test_keys_alone_open_and_close_a_cell(opened: Any, real: Report) -> None:
    page = opened(real)
    keyboard = page.page.keyboard
    place = "document.activeElement.dataset.place"
    page.page.locator("#filters button").focus()
    keyboard.press("Tab")
    # The first that is red.
    assert page(place).endswith("ddp-fp32-w2:memory")
    keyboard.press("ArrowDown")
    assert page(place).endswith("ddp-bf16_upcast-w2:memory")
    keyboard.press("ArrowRight")
    assert page(place).endswith("ddp-bf16_upcast-w2:data")
    keyboard.press("Home")
    assert page(place).endswith("ddp-bf16_upcast-w2:active")
    keyboard.press("ArrowLeft")
    keyboard.press("ArrowUp")
    assert page(place).endswith("ddp-fp32-w2:active")
    keyboard.press("End")
    keyboard.press("Enter")
    assert page.page.locator("#detail").is_visible()
    assert page.page.locator("#detail-title").inner_text() == "ddp-fp32-w2 (faulty_driver:Faulty)"
    keyboard.press("Escape")
    assert not page.page.locator("#detail").is_visible()
    assert page(place).endswith("ddp-fp32-w2:damage"), "the focus goes back to where it was"


def test_a_link_opens_its_cell(opened: Any, real: Report) -> None:
    page = opened(real)
    page.verdict("fsdp2-fp32-w2:names").click()
    fragment = page("location.hash")
    again = opened(real, fragment=fragment)
    assert again.page.locator("#verdict h3").inner_text() == "names: failed"
    assert "key _orig_mod.lm_head.weight" in again.page.locator("#detail").text_content()
    again.page.locator("#detail").get_by_role("button", name="Close").click()
    # The event that a dialog was closed comes a task later.
    again.wait_for("location.hash === ''")
    unknown = opened(real, fragment="#nothing%20here")
    assert not unknown.page.locator("#detail").is_visible()


@pytest.mark.parametrize("width", [360, 768, 1400])
def test_nothing_sticks_out_of_a_narrow_screen(opened: Any, real: Report, width: int) -> None:
    page = opened(real, width=width)
    assert page("document.documentElement.scrollWidth") <= width
    labels = page("Math.min(...[...document.querySelectorAll('.matrix tbody th')].map((th) => th.clientWidth))")
    assert labels >= 100, "a cell's name must be readable"
    page.verdict("fsdp1-bf16_upcast-w2:parity").click()
    assert page("document.getElementById('detail').scrollWidth <= document.getElementById('detail').clientWidth")
    assert page("document.getElementById('detail').getBoundingClientRect().width") <= width


@pytest.mark.parametrize("width", [360, 1400])
def test_the_table_of_names_can_be_read_on_any_screen(opened: Any, real: Report, width: int) -> None:
    page = opened(real, width=width)
    page.verdict("fsdp2-fp32-w2:names").click()
    rows = page.page.locator("#detail details", has_text="Names:").locator("tbody tr")
    # The odd ones first: keys that only a file has, of which nothing is stored or held.
    assert rows.first.locator("td").all_inner_texts() == [
        "none",
        "",
        "key _orig_mod.lm_head.weight",
        "",
        "",
        "",
        "",
        ".",
    ]
    texts = [[" ".join(text.split()) for text in row.locator("td").all_inner_texts()] for row in rows.all()]
    expected = ["model.embed_tokens.weight", "128 x 32", "=", "float32", "DTensor, Shard(dim=0)", "2,048", "1"]
    assert expected in [row[:-1] for row in texts]
    # Shapes, dtypes and numbers stay in one line; a name is cut at its dots.
    lines = """(place) => Math.max(...[...document.querySelectorAll(`#detail .data tbody td:nth-child(${place})`)].map((td) => {
        const range = document.createRange();
        range.selectNodeContents(td);
        return new Set([...range.getClientRects()].map((one) => Math.round(one.top))).size;
    }))"""
    assert [page.page.evaluate(lines, place) for place in (2, 4, 5, 6, 7)] == [1] * 5
    words = page(
        """[...document.querySelectorAll('#detail .data .name')].flatMap((td) => [...td.childNodes]).filter((one) => one.data)
        .map((one) => { const range = document.createRange(); range.selectNodeContents(one); return range.getClientRects().length; })"""
    )
    assert max(words) <= 2, "the name of a module is not cut, but may follow 'key'"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_in_the_dark_and_in_the_light(opened: Any, real: Report, scheme: str) -> None:
    """WCAG 2.2 asks for a contrast of 4.5 (https://www.w3.org/TR/WCAG22/#contrast-minimum), of tiles on their own colour."""
    page = opened(real, scheme=scheme)
    contrast = """() => {
        const light = (colour) => colour.match(/[\\d.]+/g).slice(0, 3).map((one) => one / 255)
            .map((one) => one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4)
            .reduce((sum, one, at) => sum + one * [0.2126, 0.7152, 0.0722][at], 0);
        const clear = (colour) => /, 0\\)$/.test(colour);
        return ['good', 'known', 'bad', 'dim'].map((name) => '.verdict.' + name)
            .concat('.tile.bad', '.tile.dim', '.tile.dim span', '.causes .bad', '.causes a', '.copy', '.hint', '.reasons a').map((name) => {
                const element = document.querySelector(name);
                const one = light(getComputedStyle(element).color);
                let behind = element;
                while (behind && clear(getComputedStyle(behind).backgroundColor)) behind = behind.parentElement;
                const back = light(getComputedStyle(behind).backgroundColor);
                return (Math.max(one, back) + 0.05) / (Math.min(one, back) + 0.05);
            });
    }"""
    assert min(page(contrast)) >= 4.5
    before = page("getComputedStyle(document.body).backgroundColor")
    page.page.get_by_role("button", name="Dark or light").click()
    assert page("getComputedStyle(document.body).backgroundColor") != before
    assert min(page(contrast)) >= 4.5


def test_the_timeline_has_a_row_for_each_device_and_leads_to_the_cells(opened: Any, real: Report) -> None:
    page = opened(real)
    chart = page.page.locator("#timeline-chart")
    spans = real.session["timeline"]
    assert chart.locator("rect.run").count() == len(spans)
    assert {text for text in chart.locator("text").all_text_contents() if text.startswith("cpu-")} == {
        span["device"] for span in spans
    }
    assert 0 < chart.locator("rect.bad").count() < len(spans)
    widest = page(
        "[...document.querySelectorAll('rect.bad')].sort((a, b) => b.width.baseVal.value - a.width.baseVal.value)[0].querySelector('title').textContent"
    )
    assert "fsdp2-bf16_upcast-w2" in widest
    page(
        "[...document.querySelectorAll('rect.bad')].sort((a, b) => b.width.baseVal.value - a.width.baseVal.value)[0].dispatchEvent(new MouseEvent('click', {bubbles: true}))"
    )
    assert "bf16_upcast-w2" in page.page.locator("#detail-title").inner_text()


def test_an_empty_and_an_interrupted_report_are_pages_too(opened: Any) -> None:
    page = opened(Report(session={"ending": "interrupted"}, unreached=["a::b"]))
    assert page.page.locator("[role=alert]").inner_text() == "interrupted: 1 items were not reached."


#: The points of a polyline or polygon of the chart with that title.
POINTS = """([title, part]) => [...document.querySelectorAll('#detail figure')]
    .find((one) => one.querySelector('figcaption').textContent === title)
    .querySelector(part).getAttribute('points').split(' ').map((point) => point.split(',').map(Number))"""


def test_a_deviation_leaves_the_band_at_the_step_that_the_check_names(opened: Any, real: Report) -> None:
    page = opened(real)
    page.verdict("fsdp1-bf16_upcast-w2:parity").click()
    assert "step 17: the loss is" in page.page.locator("#verdict pre").first.inner_text()
    title = "Loss: relative difference to the reference"
    own = page.page.evaluate(POINTS, [title, ".curve.own"])
    _, *band, _ = page.page.evaluate(POINTS, [title, ".band"])
    assert [x for x, _ in own] == [x for x, _ in band]
    # What is higher on the screen has the smaller number.
    outside = [step for step, ((_, y), (_, top)) in enumerate(zip(own, band, strict=True), 1) if y < top]
    assert outside[0] == 17
    legend = page.page.locator("#detail figure", has_text=title).locator(".legend")
    assert "allowed: 0.001" in legend.inner_text()


def test_the_resumed_run_is_drawn_on_the_first(opened: Any, real: Report) -> None:
    row = next(row for row in real.rows if row.cell == "ddp-fp32-w2")
    # The second loss after the load is too large.
    row.steps["resumed_loss"][4] = 0.5 + (row.steps["loss"][4] or 0)
    page = opened(real)
    page.verdict("ddp-fp32-w2:active").click()
    own, resumed = (page.page.evaluate(POINTS, ["Loss", f".curve.{kind}"]) for kind in ("own", "resumed"))
    assert resumed[0] == own[3]
    assert resumed[1][0] == own[4][0]
    assert resumed[1][1] < own[4][1]
    assert "this cell, resumed" in page.page.locator("#detail .legend").first.inner_text()


def test_memory_is_what_each_rank_holds(opened: Any, real: Report) -> None:
    page = opened(real)
    page.verdict("fsdp2-fp32-w2:active").click()
    rows = [row.locator("th, td").all_inner_texts()[:6] for row in page.page.locator("#detail .memory tbody tr").all()]
    assert rows == [
        ["fsdp2-fp32-w2", "0", "52.3 KiB", "52.3 KiB", "105 KiB", "209 KiB"],
        ["fsdp2-fp32-w2", "1", "52.3 KiB", "52.3 KiB", "105 KiB", "209 KiB"],
        ["ddp-fp32-w2", "0", "105 KiB", "105 KiB", "209 KiB", "419 KiB"],
    ]
    widths = page(
        "[...document.querySelectorAll('.memory .stack')].map((one) => [...one.children].reduce((sum, part) => sum + part.offsetWidth, 0))"
    )
    assert widths[0] == widths[1] < widths[2] <= page("document.querySelector('.memory .stack').offsetWidth") + 2
    text = page.page.locator("#detail").inner_text()
    assert "Peak memory" not in text, "on the CPU that is the process's"
    real.session["device"] = "cuda"
    page = opened(real)
    page.verdict("fsdp2-fp32-w2:active").click()
    assert "Peak memory of the GPU" in page.page.locator("#detail").inner_text()


def test_the_mesh_shows_who_holds_what(opened: Any, real: Report) -> None:
    row = next(row for row in real.rows if row.cell == "fsdp2-fp32-w2")
    row.mesh = {
        "dims": [{"name": "dp_shard", "size": 2}, {"name": "tp", "size": 2}],
        "ranks": [{"rank": rank, "at": [rank // 2, rank % 2]} for rank in range(4)],
        "layouts": [
            {
                "names": ["layers.*.up.weight", "head.weight"],
                "shape": [8, 4],
                "placement": "dp_shard=Shard(0), tp=Shard(1)",
                "parts": ["0:4, 0:2", "0:4, 2:4", "4:8, 0:2", "4:8, 2:4"],
            },
            {
                "names": ["norm.weight"],
                "shape": [3],
                "placement": "dp_shard=Shard(0)",
                "parts": [*["0:2"] * 2, *["2:3"] * 2],
            },
        ],
    }
    page = opened(real)
    page.verdict("fsdp2-fp32-w2:active").click()
    grid = page.page.locator("#mesh")
    assert grid.locator("thead th").all_inner_texts() == ["", "tp 0", "tp 1"]
    assert grid.locator("tbody th").all_inner_texts() == ["dp_shard 0", "dp_shard 1"]
    texts = [cell.locator("strong, span").all_inner_texts() for cell in grid.locator("td").all()]
    assert texts == [[f"rank {rank}", part] for rank, part in enumerate(row.mesh["layouts"][0]["parts"])]
    assert drawn(page) == [(0, 0, 30, 20), (30, 0, 30, 20), (0, 20, 30, 20), (30, 20, 30, 20)]
    assert len(colours(page)) == 4
    page.page.get_by_label("Parameter").select_option("head.weight")
    assert len(colours(page)) == 4
    page.page.get_by_label("Parameter").select_option("norm.weight")
    assert "3; dp_shard=Shard(0); ranks of one colour" in grid.locator(".hint").inner_text()
    assert [round(box[1]) for box in drawn(page)] == [0, 0, 27, 27]
    assert len(colours(page)) == 2
    # The mesh that has no name for the rows: ranks in a line.
    row.mesh |= {
        "dims": [{"name": "rank", "size": 2}],
        "ranks": [{"rank": rank, "at": [rank]} for rank in range(2)],
        "layouts": [{"names": ["a"], "shape": [8, 4], "placement": "", "parts": ["all", "none"]}],
    }
    page = opened(real, width=390)
    page.verdict("fsdp2-fp32-w2:active").click()
    assert page.page.locator("#mesh thead th").all_inner_texts() == ["", "rank 0", "rank 1"]
    assert drawn(page) == [(0, 0, 60, 40)]
    page.page.keyboard.press("Escape")
    page.verdict("ddp-fp32-w2:active").click()
    assert page.page.locator("#mesh").count() == 0


def drawn(page: Any) -> list[tuple[float, ...]]:
    """The parts of the tensor that are filled: x, y, width and height."""
    boxes = "[...document.querySelectorAll('#mesh rect:not(.whole)')].map((one) => one.getBBox()).map(({x, y, width, height}) => [x, y, width, height])"
    return [tuple(box) for box in page(boxes)]


def colours(page: Any) -> set[str]:
    return set(page("[...document.querySelectorAll('#mesh rect:not(.whole)')].map((one) => one.style.fill)"))


def test_the_timeline_says_what_its_gaps_were(opened: Any, real: Report) -> None:
    page = opened(real)
    titles = page.page.locator("#timeline-chart rect.gap title").all_text_contents()
    assert {title.rpartition(":")[0] for title in titles} <= {gap["why"] for gap in real.session["gaps"]}
    assert any(title.startswith("collection, and start of the fork servers: ") for title in titles)
    # A text that does not fit is cut; its title is whole.
    assert "collection, and start of the fork…" in " ".join(
        page.page.locator("#timeline-chart text.gap").all_text_contents()
    )
    starts = page("[...document.querySelectorAll('#timeline-chart rect')].map((one) => one.x.baseVal.value)")
    assert min(starts) == starts[0], "the first gap begins before the first run"
    # An older report does not say why.
    del real.session["gaps"]
    page = opened(real)
    titles = page.page.locator("#timeline-chart rect.gap title").all_text_contents()
    assert {title.partition(":")[0] for title in titles} == {"no run"}
