"""The HTML page, in a real browser: matrix, filters, details, keyboard, narrow screens, contrast.

Skipped where there is no browser: see docs/reports.md for what CI installs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pytest_distcompat.report import Report, write_report

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
        (f"{one.place}:{one.cell}:{one.check}", one.word) for one in real.results
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
    context.close()


def test_filters_narrow_rows_and_columns(opened: Any, real: Report) -> None:
    page = opened(real)

    def rows() -> list[str]:
        found: list[str] = page(
            "[...document.querySelectorAll('.matrix tbody tr:not([hidden])')].map((tr) => tr.dataset.cell)"
        )
        return found

    form = page.page.locator("#filters")
    form.get_by_label("Strategy").select_option("fsdp2")
    assert rows() == ["fsdp2-fp32-w2", "fsdp2-bf16_mixed-w2", "fsdp2-fp16_mixed-w2"]
    form.get_by_label("Status").select_option("red")
    assert rows() == ["fsdp2-fp32-w2", "fsdp2-bf16_mixed-w2"]
    form.get_by_label("Check").select_option("optimizer")
    assert rows() == ["fsdp2-bf16_mixed-w2"]
    heads = page("[...document.querySelectorAll('.matrix thead th:not([hidden])')].map((th) => th.textContent)")
    assert heads == ["optimizer"]
    form.get_by_role("button", name="Show all").click()
    page.page.wait_for_function("document.getElementById('shown').textContent === '9 of 9 cells'")
    form.get_by_label("Cell contains").fill("fsdp1 bf16")
    assert rows() == ["fsdp1-bf16_mixed-w2"]
    form.get_by_label("Cell contains").fill("nothing at all")
    assert rows() == []
    assert page.page.locator("#shown").text_content() == "0 of 9 cells"


def test_a_cell_shows_ranks_names_dtypes_curves_and_bars(opened: Any, real: Report) -> None:
    page = opened(real)
    page.verdict("fsdp1-bf16_mixed-w2:parity").click()
    detail = page.page.locator("#detail")
    assert detail.is_visible()
    text = detail.inner_text()
    for said in ("step 17: the loss is", "faulty_suite.py::TestFaulty::test[fsdp1-bf16_mixed-w2:parity]", "Runs"):
        assert said in text
    dtypes = [row.inner_text().split("\t") for row in detail.locator("table").first.locator("tbody tr").all()]
    assert ["master", "float32", "bfloat16 (differs)"] in [[" ".join(one.split()) for one in row] for row in dtypes]
    curves = page(
        "[...document.querySelectorAll('#detail figure')].map((one) => [one.querySelector('figcaption').textContent, one.querySelectorAll('.curve').length, one.querySelector('.curve.own').getAttribute('points').split(' ').length])"
    )
    assert [(title, count >= 3, steps) for title, count, steps in curves] == [
        ("Loss", True, 20),
        ("Gradient norm", True, 20),
    ]
    assert detail.locator(".curve.reference").count() == 2
    assert detail.locator(".bar.own").count() == 3
    assert detail.locator(".name").count() > 0


def test_a_crashed_cell_shows_each_rank_and_the_other_verdicts(opened: Any, real: Report) -> None:
    page = opened(real)
    page.verdict("fsdp2-bf16_mixed-w2:names").click()
    detail = page.page.locator("#detail")
    ranks = [one for one in detail.locator("details details summary").all_inner_texts() if one.startswith("rank")]
    assert {one.split(":")[0] for one in ranks} == {"rank 0", "rank 1"}
    assert "Stack at the time limit:" in detail.locator("details[open] p").all_inner_texts()
    detail.locator(".chips button", has_text="dtypes").click()
    assert detail.locator("#verdict h3").inner_text() == "dtypes: hung"
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
    assert page(place).endswith("ddp-bf16_mixed-w2:memory")
    keyboard.press("ArrowRight")
    assert page(place).endswith("ddp-bf16_mixed-w2:data")
    keyboard.press("Home")
    assert page(place).endswith("ddp-bf16_mixed-w2:active")
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
    # A dialog tells that it was closed a task later.
    again.page.wait_for_function("location.hash === ''")
    unknown = opened(real, fragment="#nothing%20here")
    assert not unknown.page.locator("#detail").is_visible()


@pytest.mark.parametrize("width", [360, 768, 1400])
def test_nothing_sticks_out_of_a_narrow_screen(opened: Any, real: Report, width: int) -> None:
    page = opened(real, width=width)
    assert page("document.documentElement.scrollWidth") <= width
    labels = page("Math.min(...[...document.querySelectorAll('.matrix tbody th')].map((th) => th.clientWidth))")
    assert labels >= 100, "a cell's name must be readable"
    page.verdict("fsdp1-bf16_mixed-w2:parity").click()
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
    texts = [[" ".join(one.split()) for one in row.locator("td").all_inner_texts()] for row in rows.all()]
    told = ["model.embed_tokens.weight", "128 x 32", "=", "float32", "DTensor, Shard(dim=0)", "2,048", "1"]
    assert told in [row[:-1] for row in texts]
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
    """WCAG 2.2 asks for a contrast of 4.5 (https://www.w3.org/TR/WCAG22/#contrast-minimum)."""
    page = opened(real, scheme=scheme)
    contrast = """() => {
        const light = (colour) => colour.match(/[\\d.]+/g).slice(0, 3).map((one) => one / 255)
            .map((one) => one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4)
            .reduce((sum, one, at) => sum + one * [0.2126, 0.7152, 0.0722][at], 0);
        const back = light(getComputedStyle(document.body).backgroundColor);
        return ['good', 'known', 'bad', 'dim'].map((name) => {
            const one = light(getComputedStyle(document.querySelector('.verdict.' + name)).color);
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
    assert chart.locator("rect").count() == len(spans)
    assert {one for one in chart.locator("text").all_text_contents() if one.startswith("cpu-")} == {
        span["device"] for span in spans
    }
    assert 0 < chart.locator("rect.bad").count() < len(spans)
    widest = page(
        "[...document.querySelectorAll('rect.bad')].sort((a, b) => b.width.baseVal.value - a.width.baseVal.value)[0].querySelector('title').textContent"
    )
    assert "fsdp2-bf16_mixed-w2" in widest
    page(
        "[...document.querySelectorAll('rect.bad')].sort((a, b) => b.width.baseVal.value - a.width.baseVal.value)[0].dispatchEvent(new MouseEvent('click', {bubbles: true}))"
    )
    assert "bf16_mixed-w2" in page.page.locator("#detail-title").inner_text()


def test_an_empty_and_an_interrupted_report_are_pages_too(opened: Any) -> None:
    page = opened(Report(session={"ending": "interrupted"}, unreached=["a::b"]))
    assert page.page.locator("[role=alert]").inner_text() == "interrupted: 1 items were not reached."
