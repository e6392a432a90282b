"""Makes the pictures of docs/reports.md of real.json: ``python -m tests.report.screenshots`` in the repository's root."""

from __future__ import annotations

import tempfile
from pathlib import Path

from pytest_distcompat.report import Report, write_report

from .conftest import CHROMIUM, REAL

IMAGES = Path(__file__).parents[2] / "docs" / "images"
#: A desk and a phone.
SIZES = ((1280, 800), (390, 780))
#: Which verdict is opened, and which heading is then at the top.
SHOWN = {
    "matrix": ("", "#matrix"),
    "hung": ("fsdp2-bf16_mixed-w2:names", ""),
    "cell": ("fsdp1-bf16_mixed-w2:parity", "#detail h3:has-text('Dtypes, expected')"),
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
        browser.close()


if __name__ == "__main__":
    main()
