"""Markdown report, and a short text for chat.

``report.write`` calls ``markdown`` for ``.md`` files and the summary of a step on GitHub, and
``chat`` for ``.txt`` files. Both get a ``Report``: the *verdicts* (passed, failed, ...) of a
session, each of one *check* in one *cell* of a suite. A cell is a configuration of the trainer, as
``fsdp2-fp32-w2``; a *driver* is the trainer. Verdicts that failed with the same message, numbers
aside, have one *cause*. A *row* is what is known of a cell besides its verdicts: which checks are
not applicable, and what its training cost. The page begins::

    # Distributed compatibility

    42 results, 16 runs, device cpu; torch 2.13.0
    ...
    ## Failures by cause

    1. **FAIL**, 2 verdicts: 3 parameters have other names
       - fsdp2-fp32-w2 (my_driver): names
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pytest_distcompat.excerpt import visible
from pytest_distcompat.report.causes import Cause, causes, unshown
from pytest_distcompat.report.document import Report
from pytest_distcompat.report.result import Row, Table, not_applicable_reasons, tables
from pytest_distcompat.report.settings import settings_tables
from pytest_distcompat.report.text import HEADLINE, counts_text, cut, follows
from pytest_distcompat.status import Verdict

#: The longest chat message, in characters (Slack cuts at 3000:
#: https://docs.slack.dev/reference/block-kit/blocks/section-block).
CHAT = 2999
#: How many causes a page shows at most.
CAUSES = 50
#: How many causes a chat message shows at most.
CHAT_CAUSES = 8

#: Characters that Markdown would read as markup; an underscore inside a word is none.
_SPECIAL = re.compile(r"([\\`*\[\]<>|~&]|(?<!\w)_|_(?!\w)|^[#+=-])")


def markdown(report: Report) -> str:
    """Return the page: the failures by cause, then tables of settings, verdicts and costs."""
    return "\n".join(_page(report)) + "\n"


def chat(report: Report) -> str:
    """Return a chat message of less than 3000 characters: counts, versions, the first causes."""
    text = "\n".join(_chat_lines(report))
    # The last character is the newline.
    return cut(text, CHAT - 1) + "\n"


def _chat_lines(report: Report) -> Iterator[str]:
    """Yield the lines of the chat message, in full."""
    yield visible(headline(report))
    yield visible(counts_text(report))
    versions = _versions(report)
    if versions:
        yield visible(versions)
    all_causes = causes(report.results)
    for cause in all_causes[:CHAT_CAUSES]:
        # ``FAIL x 3``, or ``FAIL, CRASH x 3``: the statuses, and how many verdicts have the cause.
        counted = f"{cause.words} x {len(cause.results)}"
        cells = ", ".join(cause.cells)
        yield visible(f"- {counted}: {cut(cause.headline, 120)}")
        yield visible(f"  {cut(cells, 100)}")
        if cause.reproduce and len(cause.reproduce) < 160:
            yield visible(f"  {cause.reproduce}")
    if len(all_causes) > CHAT_CAUSES:
        # ``and 3 more causes``.
        yield visible(f"- {unshown(len(all_causes) - CHAT_CAUSES)}")
    # How the report differs from the earlier one that the user gave as baseline, line by line.
    baseline_lines = report.session.get("baseline", {}).get("text", ())
    for line in baseline_lines[:10]:
        if line:
            yield visible(cut(line, 300))


def headline(report: Report) -> str:
    """Return the outcome in a few words: ``Distributed compatibility: 3 failed``."""
    red = sum(result.red for result in report.results)
    parts = []
    if report.interrupted:
        parts.append("interrupted")
    elif not red:
        parts.append("ok")
    if red:
        parts.append(f"{red} failed")
    return f"Distributed compatibility: {', '.join(parts)}"


def escape(text: str) -> str:
    """Return a text on one line, escaped so that nothing in it is markup."""
    line = " ".join(text.split())
    return _SPECIAL.sub(r"\\\1", visible(line))


def _versions(report: Report) -> str:
    """Return the versions of the session's libraries: ``torch 2.13.0, accelerate 1.14.0``."""
    texts = []
    for name, version in report.session.get("versions", {}).items():
        texts.append(f"{name} {version}")
    return ", ".join(texts)


def _page(report: Report) -> Iterator[str]:
    """Yield the lines of the page."""
    yield from ("# Distributed compatibility", "")
    if report.interrupted:
        yield from (f"**Interrupted**: {len(report.unreached)} items were not reached.", "")
    session = report.session
    results = len(report.results)
    runs = session.get("runs", 0)
    device = session.get("device", "?")
    yield escape(f"{results} results, {runs} runs, device {device}; {_versions(report)}")
    yield from ("", escape(counts_text(report)))
    if session.get("baseline"):
        yield from ("", "## Since the baseline", "")
        for line in session["baseline"]["text"]:
            yield f"- {escape(line)}"
    yield from _causes(causes(report.results))
    for table in settings_tables(report.results):
        yield from _suite(table, f"Settings of {table.title}")
    for table in tables(report.results):
        yield from _suite(table, table.title)
    yield from _not_applicable(report.rows)
    yield from _cost(report.rows)


def _causes(all_causes: list[Cause]) -> Iterator[str]:
    """Yield a numbered list of causes, each with its cells and a command that reproduces it."""
    if all_causes:
        yield from ("", "## Failures by cause", "")
    for number, cause in enumerate(all_causes[:CAUSES], 1):
        # ``follows`` returns ``, may follow from 2`` for a consequence of cause 2.
        counted = f"{len(cause.results)} verdicts{follows(cause)}"
        shown_headline = escape(cut(cause.headline, HEADLINE))
        yield f"{number}. **{cause.words}**, {counted}: {shown_headline}"
        for cell, checks in cause.cells.items():
            names = escape(", ".join(checks))
            yield f"   - {escape(cell)}: {names}"
        if cause.reproduce:
            command = " ".join(cause.reproduce.split())
            # The indent makes the block a part of the list's item.
            yield from ("", "   ```console", f"   $ {visible(command)}", "   ```", "")
    if len(all_causes) > CAUSES:
        yield f"\n{unshown(len(all_causes) - CAUSES)}"


def _suite(table: Table, title: str) -> Iterator[str]:
    """Yield the matrix of a suite: a row for each cell, a column for each check; then reasons."""
    yield from ("", f"## {escape(title)}", "")
    yield _table_row(["", *map(escape, table.checks)])
    yield "|" + " --- |" * (len(table.checks) + 1)
    for cell in table.cells:
        # ``ok``, ``FAIL`` and so on; empty where there is no verdict.
        words = [table.word(cell, check) for check in table.checks]
        yield _table_row([escape(cell), *words])
    yield from _reasons(table.results)


def _reasons(results: Iterable[Verdict]) -> Iterator[str]:
    """Yield the reasons of the verdicts that are neither red nor passed, one per line.

    Red are those that make a session fail; their messages are among the causes.
    """
    # The word of the status and the reason, to the verdicts.
    names_by_reason: dict[tuple[str, str], list[str]] = {}
    for result in results:
        if result.status == "passed" or result.red:
            continue
        reason = (result.status.word, result.why)
        name = f"{result.cell}:{result.check}"
        names_by_reason.setdefault(reason, []).append(name)
    if names_by_reason:
        yield ""
    for (word, why), names in names_by_reason.items():
        affected = escape(", ".join(names))
        yield f"- {word}: {escape(why)} ({affected})"


def _table_row(cells: Iterable[str]) -> str:
    """Return a row of a Markdown table: ``| a | b |``."""
    return f"| {' | '.join(cells)} |"


def _not_applicable(rows: Iterable[Row]) -> Iterator[str]:
    """Yield the reasons for which checks are not applicable in cells, one per line."""
    rows_by_driver: dict[str, list[Row]] = {}
    for row in rows:
        if row.not_applicable:
            rows_by_driver.setdefault(row.driver, []).append(row)
    if rows_by_driver:
        yield from ("", "## Not applicable", "")
    for driver, driver_rows in rows_by_driver.items():
        for (check, reason), cells in not_applicable_reasons(driver_rows).items():
            plural = "s" if len(cells) > 1 else ""
            counted = f"{len(cells)} cell{plural}"
            names = escape(", ".join(cells))
            title = escape(f"{driver}: {check}")
            yield f"- {title}: {escape(reason)} ({counted}: {names})"


def _cost(rows: Iterable[Row]) -> Iterator[str]:
    """Yield a table of what the training of each cell cost; nothing if none was measured."""
    rows_with_cost = [row for row in rows if row.cost]
    if not rows_with_cost:
        return
    yield from ("", "## Cost", "")
    titles = [column.title for column in _COST_COLUMNS]
    yield _table_row(["driver", "cell", *titles])
    yield _table_row(["---"] * (2 + len(titles)))
    for row in rows_with_cost:
        cells = [escape(row.driver), escape(row.cell)]
        for column in _COST_COLUMNS:
            cells.append(column.text(row.cost.get(column.field)))
        yield _table_row(cells)


@dataclass(frozen=True)
class _CostColumn:
    """A column of the table of costs.

    Attributes:
        field: The field of ``cost.Cost``, which is in seconds or bytes.
        title: What it is called here, with its unit.
        factor: What the field is multiplied by to have this unit.
        digits: How many digits are shown after the point.
    """

    field: str
    title: str
    factor: float
    digits: int

    def text(self, value: float | None) -> str:
        """Return the number as the table has it.

        A number that JSON does not have, such as infinity, is None in a report, and empty here.
        """
        if value is None:
            return ""
        return f"{value * self.factor:.{self.digits}f}"


_COST_COLUMNS = (
    _CostColumn("step_seconds", "step, ms", 1000.0, 1),
    _CostColumn("tokens_per_second", "tokens/s a rank", 1.0, 0),
    _CostColumn("state_bytes", "bytes of master and state a parameter", 1.0, 1),
    _CostColumn("memory", "peak memory, MiB", 1 / 2**20, 0),
)
