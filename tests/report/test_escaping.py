"""Names and messages that are scripts, on the HTML page, in a real browser. Skipped where there is none."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from pytest_distcompat.report.document import Report
from pytest_distcompat.report.write import write_report
from pytest_distcompat.status import Status, Verdict

from .conftest import NO_BROWSER

if TYPE_CHECKING:
    from pathlib import Path

    from playwright.sync_api import Browser

pytestmark = NO_BROWSER

#: What a test could put into its names and messages to run a script of its own.
HOSTILE = (
    "<script>window.hit=1</script><img src=x onerror='window.hit=1'>\"'</textarea></title><svg onload=window.hit=1>"
    "</script><!--<script> ${window.hit=1} {{ 7*7 }} \u2028"
)


def hostile(real: Report) -> Report:
    """Whatever a test can name or say is a script."""
    result = next(result for result in real.results if result.status == "failed")
    texts: dict[str, Any] = dict.fromkeys(("suite", "driver", "check", "message", "reason", "reproduce"), HOSTILE)
    evil = Verdict(cell=result.cell, status=Status.FAILED, nodeid=f"{HOSTILE}::test[x]", rank=0, **texts)
    row = next(row for row in real.rows if row.cell == result.cell)
    trained = next(row for row in real.rows if row.names)
    names = [{**name, "unwrapped": HOSTILE, "live": HOSTILE, "files": [HOSTILE]} for name in trained.names]
    dtypes = [{"kind": HOSTILE, "expected": HOSTILE, "seen": [HOSTILE]}]
    more: dict[str, Any] = {
        "names": names,
        "dtypes": dtypes,
        "not_applicable": {HOSTILE: HOSTILE},
        "steps": trained.steps,
        "cost": {},
    }
    own = dataclasses.replace(row, place=HOSTILE, driver=HOSTILE, suite=HOSTILE, runs=["evil"], **more)
    fields = {"message": HOSTILE, "text": HOSTILE}
    run = {
        **real.runs[0],
        "id": "evil",
        "ending": "raised",
        "action": HOSTILE,
        "ranks": [{"rank": 0, **fields}],
        **fields,
    }
    run = {**real.session, "versions": {HOSTILE: HOSTILE}, "gpu": HOSTILE, "ending": HOSTILE, "device": HOSTILE}
    run["timeline"] = [{"device": HOSTILE, "who": evil.nodeid, "begin": 0.0, "end": 1.0, "worker": HOSTILE}]
    run["baseline"] = {"file": HOSTILE, "text": [HOSTILE], "broken": [], "fixed": [], "missing": []}
    return Report(run, [evil], [own], [run], [HOSTILE])


def test_no_text_of_a_test_is_executed_by_the_browser(
    opened: Any, real: Report, browser: Browser, tmp_path: Path
) -> None:
    page = opened(hostile(real))
    page.page.locator(".matrix .verdict").click()
    detail = page.page.locator("#detail")
    for details in detail.locator("details").all():
        details.evaluate("(one) => { one.open = true; }")
    assert detail.inner_text().count("<script>window.hit=1</script>") > 8
    assert page("window.hit") is None
    # As text on the page and in the data, as an element nowhere; ours are the one script and the data.
    assert page("document.scripts.length") == 2
    assert page("document.querySelectorAll('img, textarea, [onload], [onerror]').length") == 0
    assert "49" not in page.page.locator("#detail-title").inner_text()


def test_the_browser_would_refuse_a_script_that_got_in(browser: Browser, real: Report, tmp_path: Path) -> None:
    """The second wall: what if one day something is not escaped."""
    path = tmp_path / "r.html"
    write_report(path, real)
    text = path.read_text(encoding="utf-8")
    inside = "<script>window.hit=1</script><img src='https://example.org/x.png' onerror='window.hit=2'>"
    path.write_text(text.replace("<main>", f"<main>{inside}"), encoding="utf-8")
    page = browser.new_page()
    refused: list[str] = []
    page.on("console", lambda message: refused.append(message.text))
    page.goto(f"file://{path}")
    assert page.evaluate("window.hit") is None
    assert len([text for text in refused if "Content Security Policy" in text]) >= 2
    page.close()
