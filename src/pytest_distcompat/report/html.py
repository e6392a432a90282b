"""HTML report: one page without network access or further files.

``report.write`` calls ``html`` with the ``Report`` of a session: its *verdicts* (passed, failed,
...), each of one *check* in one *cell* of a suite. A cell is a configuration of the trainer, as
``fsdp2-fp32-w2``: strategy, precision, 2 ranks. A *driver* is the trainer. ``distcompat trend``
calls ``trend_html`` with the verdicts of many nights.

The pages are jinja2 templates in ``templates/``. Each has a script of its own and the whole report
as compressed JSON, with which the script filters verdicts and shows details. Without the script the
page still has all matrices and messages.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

from pytest_distcompat.report.causes import causes
from pytest_distcompat.report.document import Report, facets
from pytest_distcompat.report.markdown import headline
from pytest_distcompat.report.result import by_reason, check_order, not_applicable_reasons, tables
from pytest_distcompat.report.settings import settings_tables
from pytest_distcompat.report.text import counts_text, follows
from pytest_distcompat.report.trend import KINDS, Trend, changes
from pytest_distcompat.status import Status, Verdict, all_statuses, explained_statuses

if TYPE_CHECKING:
    from markupsafe import Markup

#: The Content-Security-Policy of a page: it may load nothing. Styles are allowed in it, because its
#: own script sets bars and colours.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"

#: A URL in a text, without the punctuation after it. The page's script has the same expression.
_URL = re.compile(r"(https?://[^\s<>\"'`]*[^\s<>\"'`.,;:!?)\]}])")

_TEMPLATES = resources.files("pytest_distcompat.report") / "templates"


def html(report: Report) -> str:
    """Return the page of a report.

    Everything that comes from a test is text: jinja2 escapes it, and the script sets it as text.
    The policy in the head lets the browser run the page's own script, by its hash, and load
    nothing.
    """
    reasons = [(status, by_reason(report.results, status)) for status in explained_statuses()]
    return _render(
        "page",
        # The JSON for the script. Packed: a page of a hundred thousand verdicts would have 200 MB.
        data=base64.b64encode(_packed(report)).decode(),
        session=report.session,
        headline=headline(report),
        counts=counts_text(report),
        interrupted=report.interrupted,
        unreached=len(report.unreached),
        suites=tables(report.results),
        settings=settings_tables(report.results),
        overview=_overview(report.results),
        # Where a tile of the overview leads without the script: to the first verdict of its driver
        # and strategy.
        anchors=_anchors(report.results),
        causes=causes(report.results),
        reasons=reasons,
        not_applicable=not_applicable_reasons(report.rows),
        statuses=all_statuses(),
        facets=_axes(report.results),
        place=place,
        linked=linked,
        follows=follows,
    )


def trend_html(trend: Trend) -> str:
    """Return the page of a trend, with the same policy as that of a report."""
    return _render(
        "trend", trend=trend, kinds=KINDS, changes=changes, linked=linked, sparkline=sparkline
    )


def sparkline(values: Sequence[float | None]) -> str:
    """Return the SVG path through the values, 10 wide a night and 20 high: ``M5 2.0h0L15 12.0h0``.

    It has a gap where a night has no value.

    Args:
        values: A number for each night, such as seconds; None without one.
    """
    # Without zeros, so that ``top``, by which heights are divided, is never 0.
    known_values = [value for value in values if value]
    top = max(known_values, default=1.0)
    path = ""
    after_gap = True
    for night, value in enumerate(values):
        if value is None:
            after_gap = True
            continue
        # In SVG's paths M moves to a point, L draws a line to it. y grows downwards.
        command = "M" if after_gap else "L"
        x = 10 * night + 5
        y = 22 - 20 * value / top
        # h0 draws a line of no length, which is a dot: the only mark of a night between two gaps.
        path += f"{command}{x} {y:.1f}h0"
        after_gap = False
    return path


def _render(name: str, **values: Any) -> str:
    """Return a page.

    Args:
        name: The name of its template and its script: ``page`` or ``trend``.
        values: The variables of the template.
    """
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    script = _read(f"{name}.js")
    digest = hashlib.sha256(script.encode()).digest()
    digest_text = base64.b64encode(digest).decode()
    template = environment.from_string(_read(f"{name}.html.j2"))
    return template.render(
        policy=f"{POLICY}; script-src 'sha256-{digest_text}'",
        style=Markup(_read("page.css")),  # noqa: S704 - a file of this package
        script=Markup(script),  # noqa: S704 - a file of this package
        **values,
    )


def place(result: Verdict) -> str:
    """Return the key by which the page's script finds a verdict: suite, cell and check.

    The suite is its node id, as ``tests/test_a.py::TestMyTrainer``.
    """
    return f"{result.place}:{result.cell}:{result.check}"


def linked(text: str) -> Markup:
    """Return the text as HTML: escaped, with its URLs as links."""
    from markupsafe import Markup

    link = Markup('<a href="{0}" rel="noopener">{0}</a>')
    texts: list[str | Markup] = []
    for index, part in enumerate(_URL.split(text)):
        # A split by one group: every second part is a URL.
        is_url = index % 2 == 1
        if is_url:
            texts.append(link.format(part))
        else:
            texts.append(part)
    return Markup().join(texts)


def _anchors(results: list[Verdict]) -> dict[str, str]:
    """Return the anchors that tiles lead to: the key of a verdict to its anchor.

    Only the first verdict of each driver and strategy has one, as ``driver=torch&strategy=ddp``.
    """
    first_of_tile: dict[str, Verdict] = {}
    for result in results:
        strategy = _strategy(result)
        anchor = f"driver={result.driver}&strategy={strategy}"
        first_of_tile.setdefault(anchor, result)
    return {place(first): anchor for anchor, first in first_of_tile.items()}


#: How many verdicts have which status.
_Counts = list[tuple[Status, int]]


def _overview(results: list[Verdict]) -> dict[str, dict[str, _Counts]]:
    """Return the tiles of the overview: driver to strategy to the counts of statuses.

    Example: ``{"torch": {"ddp": [(Status.FAILED, 2), (Status.PASSED, 8)]}}``. The worst status
    comes first, and of equally bad ones the most frequent.
    """

    def badness(count_of_status: tuple[Status, int]) -> tuple[int, int]:
        status, count = count_of_status
        return status.weight, count

    overview: dict[str, dict[str, _Counts]] = {}
    for tile, statuses in _statuses_by_tile(results).items():
        counts_by_status = Counter(statuses)
        counts = sorted(counts_by_status.items(), key=badness, reverse=True)
        strategies = overview.setdefault(tile.driver, {})
        strategies[tile.strategy] = counts
    return overview


@dataclass(frozen=True)
class _Tile:
    """A tile of the page's overview: all verdicts of one driver under one strategy."""

    driver: str
    strategy: str


def _statuses_by_tile(results: list[Verdict]) -> dict[_Tile, list[Status]]:
    """Return the statuses of the verdicts of each tile."""
    statuses: dict[_Tile, list[Status]] = {}
    for result in results:
        tile = _Tile(result.driver, _strategy(result))
        statuses.setdefault(tile, []).append(result.status)
    return statuses


def _packed(report: Report) -> bytes:
    """Return the JSON of a report, compressed a piece at a time to save memory."""
    packed = io.BytesIO()
    # Without a time, so that equal reports give equal pages.
    with gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as file:
        file.writelines(piece.encode() for piece in report.pieces())
    return packed.getvalue()


def _strategy(result: Verdict) -> str:
    """Return the strategy in the id of a verdict's cell; empty if ``Cell.parse`` refuses the id."""
    return str(facets(result.cell).get("strategy", ""))


def _axes(results: list[Verdict]) -> dict[str, list[str]]:
    """Return the values of each filter of the page, as ``{"driver": ["torch"], ...}``.

    Strategies are sorted; the others are in the order of their appearance.
    """
    # Dicts, because they keep the order and have each only once.
    drivers: dict[str, None] = {}
    precisions: dict[str, None] = {}
    strategies = set()
    for result in results:
        drivers[result.driver] = None
        cell = facets(result.cell)
        # Empty if ``Cell.parse`` refuses the id.
        if cell:
            strategies.add(str(cell["strategy"]))
            precisions[str(cell["precision"])] = None
    return {
        "driver": list(drivers),
        "strategy": sorted(strategies),
        "precision": list(precisions),
        "check": check_order(results),
    }


def _read(name: str) -> str:
    """Return the text of a file in ``templates/``."""
    return (_TEMPLATES / name).read_text(encoding="utf-8")
