"""Makes the pictures of docs/reports.md: ``python -m tests.report.screenshots`` in the repository's root.

They show real.json. With the JSON of a session of the built-in suite as its argument it makes the overview, which is in the README too: of
that session and, as one row more, of real.json. With the JSON of the session of docs/parallel.md as a second one it makes that page's picture.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from pytest_distcompat.report.document import Report
from pytest_distcompat.report.merge import merge
from pytest_distcompat.report.write import write_report

from .conftest import CHROMIUM, REAL

IMAGES = Path(__file__).parents[2] / "docs" / "images"
#: A desk and a phone.
SIZES = ((1280, 740), (390, 780))
#: Which verdict is opened, and which heading is then at the top.
SHOWN = {
    "matrix": ("", "#matrix"),
    "hung": ("fsdp2-bf16_upcast-w2:names", ""),
    "cell": ("fsdp1-bf16_upcast-w2:parity", "#detail h3:has-text('Dtypes, expected')"),
}


def main() -> None:
    """Write one picture for each thing and width."""
    from playwright.sync_api import sync_playwright

    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as directory, sync_playwright() as playwright:
        path = Path(directory) / "report.html"
        write_report(path, Report.read(REAL))
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for width, height in SIZES:
            for name, (verdict, heading) in SHOWN.items():
                page = browser.new_page(viewport={"width": width, "height": height}, color_scheme="light")
                page.goto(f"file://{path}")
                if verdict:
                    page.locator(f".matrix .verdict[data-place$='{verdict}']").click()
                if heading:
                    # The title of a cell stays above what is scrolled.
                    page.locator(heading).evaluate(
                        "(one) => { one.style.scrollMarginTop = '5.5rem'; one.scrollIntoView(); }"
                    )
                page.screenshot(path=str(IMAGES / f"{name}-{width}.png"))
                page.close()
        if len(sys.argv) > 1:
            write_report(path, merge([Report.read(Path(sys.argv[1])), Report.read(REAL)]))
            page = browser.new_page(viewport={"width": 1020, "height": 800}, color_scheme="light")
            page.goto(f"file://{path}")
            page.locator(".overview").screenshot(path=str(IMAGES / "overview.png"))
        if len(sys.argv) > 2:
            write_report(path, Report.read(Path(sys.argv[2])))
            page = browser.new_page(viewport={"width": 480, "height": 800}, color_scheme="light")
            page.goto(f"file://{path}")
            page.locator(".matrix .verdict").first.click()
            page.get_by_label("Parameter").select_option("2.weight")
            page.locator("#mesh").screenshot(path=str(IMAGES / "mesh.png"))
        browser.close()


if __name__ == "__main__":
    main()
