"""Markdown report, and a short text for chat."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from pytest_distcompat.excerpt import visible
from pytest_distcompat.grouping import grouped
from pytest_distcompat.report.causes import Cause, causes, unshown
from pytest_distcompat.report.document import Report
from pytest_distcompat.report.result import Row, Table, not_applicable_reasons, tables
from pytest_distcompat.report.settings import settings_tables
from pytest_distcompat.report.text import HEADLINE, counts_text, cut, follows

#: The longest chat message, in characters (Slack cuts at 3000: https://docs.slack.dev/reference/block-kit/blocks/section-block).
CHAT = 2999
#: How many causes a page and a chat message show at most.
CAUSES = 50
CHAT_CAUSES = 8

#: Characters that Markdown would read as markup; an underscore inside a word is none.
_SPECIAL = re.compile(r"([\\`*\[\]<>|~&]|(?<!\w)_|_(?!\w)|^[#+=-])")


def markdown(report: Report) -> str:
    """Return the page: failures by cause, settings, matrices, checks that are not applicable, costs of cells."""
    return "\n".join(_page(report)) + "\n"


def chat(report: Report) -> str:
    """Return a chat message: counts, versions, the first causes. Shorter than 3000 characters."""
    lines = [headline(report), counts_text(report), _versions(report)]
    found = causes(report.results)
    for cause in found[:CHAT_CAUSES]:
        lines.append(f"- {cause.words} x {len(cause.results)}: {cut(cause.headline, 120)}")
        lines.append(f"  {cut(', '.join(cause.cells), 100)}")
        if len(cause.reproduce) < 160:
            lines += [f"  {cause.reproduce}"] if cause.reproduce else []
    if len(found) > CHAT_CAUSES:
        lines.append(f"- {unshown(len(found) - CHAT_CAUSES)}")
    lines += [cut(line, 300) for line in report.session.get("baseline", {}).get("text", ())[:10]]
    return cut("\n".join(visible(line) for line in lines if line), CHAT - 1) + "\n"


def headline(report: Report) -> str:
    """Return the outcome in a few words."""
    red = sum(result.red for result in report.results)
    outcome = "interrupted" if report.interrupted else "ok" if not red else ""
    return "Distributed compatibility: " + ", ".join(filter(None, (outcome, f"{red} failed" if red else "")))


def escape(text: str) -> str:
    """Escape a text, so that nothing in it is markup."""
    return _SPECIAL.sub(r"\\\1", visible(" ".join(text.split())))


def _versions(report: Report) -> str:
    return ", ".join(f"{name} {version}" for name, version in report.session.get("versions", {}).items())


def _page(report: Report) -> Iterator[str]:
    yield from ("# Distributed compatibility", "")
    if report.interrupted:
        yield from (f"**Interrupted**: {len(report.unreached)} items were not reached.", "")
    session = report.session
    runs = f"{session.get('runs', 0)} runs"
    yield escape(f"{len(report.results)} results, {runs}, device {session.get('device', '?')}; {_versions(report)}")
    yield from ("", escape(counts_text(report)))
    if session.get("baseline"):
        yield from ("", "## Since the baseline", "", *(f"- {escape(line)}" for line in session["baseline"]["text"]))
    yield from _causes(causes(report.results))
    for table in settings_tables(report.results):
        yield from _suite(table, f"Settings of {table.title}")
    for table in tables(report.results):
        yield from _suite(table, table.title)
    yield from _not_applicable(report.rows)
    yield from _cost(report.rows)


def _causes(found: list[Cause]) -> Iterator[str]:
    if found:
        yield from ("", "## Failures by cause", "")
    for number, cause in enumerate(found[:CAUSES], 1):
        counted = f"{len(cause.results)} verdicts{follows(cause)}"
        yield f"{number}. **{cause.words}**, {counted}: {escape(cut(cause.headline, HEADLINE))}"
        for cell, checks in cause.cells.items():
            yield f"   - {escape(cell)}: {escape(', '.join(checks))}"
        if cause.reproduce:
            yield from ("", "   ```console", f"   $ {visible(' '.join(cause.reproduce.split()))}", "   ```", "")
    if len(found) > CAUSES:
        yield f"\n{unshown(len(found) - CAUSES)}"


def _suite(table: Table, title: str) -> Iterator[str]:
    yield from ("", f"## {escape(title)}", "")
    yield f"| {' | '.join(('', *map(escape, table.checks)))} |"
    yield "|" + " --- |" * (len(table.checks) + 1)
    for cell in table.cells:
        yield f"| {' | '.join((escape(cell), *(table.word(cell, check) for check in table.checks)))} |"
    # Those that are red are among the causes.
    listed = [result for result in table.results if result.status != "passed" and not result.red]
    reasons = grouped(((result.status.word, result.why), f"{result.cell}:{result.check}") for result in listed)
    if reasons:
        yield ""
    for (word, why), names in reasons.items():
        yield f"- {word}: {escape(why)} ({escape(', '.join(names))})"


def _not_applicable(rows: Iterable[Row]) -> Iterator[str]:
    """Yield the reasons for which checks are not applicable, one per line."""
    known = [row for row in rows if row.not_applicable]
    if known:
        yield from ("", "## Not applicable", "")
    for driver in dict.fromkeys(row.driver for row in known):
        for (check, reason), names in not_applicable_reasons(row for row in known if row.driver == driver).items():
            counted = f"{len(names)} cell{'s' * (len(names) > 1)}"
            yield f"- {escape(f'{driver}: {check}')}: {escape(reason)} ({counted}: {escape(', '.join(names))})"


def _cost(rows: Iterable[Row]) -> Iterator[str]:
    costs = [row for row in rows if row.cost]
    if not costs:
        return
    yield from ("", "## Cost", "")
    yield "| driver | cell | step, ms | tokens/s a rank | bytes of master and state a parameter | peak memory, MiB |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for row in costs:
        values = ((row.cost.get(name), scale, digits) for name, scale, digits in _COST)
        # None is a number that JSON does not have, such as infinity.
        numbers = ("" if value is None else f"{value * scale:.{digits}f}" for value, scale, digits in values)
        yield f"| {escape(row.driver)} | {escape(row.cell)} | {' | '.join(numbers)} |"


#: The columns of the table of costs: field, factor, digits.
_COST = (("step_seconds", 1000.0, 1), ("tokens_per_second", 1.0, 0), ("state_bytes", 1.0, 1), ("memory", 1 / 2**20, 0))
