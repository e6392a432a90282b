"""Terminal report: lines of spans, each a text with the name of its style."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from pytest_distcompat.report.causes import Cause, causes, unshown
from pytest_distcompat.report.document import Report, counts
from pytest_distcompat.report.result import Row, Table, by_reason, not_applicable_reasons, tables
from pytest_distcompat.report.settings import failing, settings_tables
from pytest_distcompat.status import Status, Verdict

#: A text and its style: ``good``, ``known``, ``bad``, ``dim``, ``head`` or nothing.
Span = tuple[str, str]
Line = tuple[Span, ...]

#: The statuses whose reasons are listed, each with the word before them.
_TITLES = {"known": "known", "simulated": "weaker than ok", "skipped": "not run", "refused": "refused"}
#: How many of the slowest runs, and of the causes of failure, are shown.
SLOWEST = 5
CAUSES = 20
#: How many of the settings that fail or are refused are shown.
SETTINGS = 12
#: The longest headline in the list of causes, in characters.
HEADLINE = 240


def cut(text: str, length: int) -> str:
    """Cut the text to that length."""
    return text if len(text) <= length else f"{text[: length - 3]}..."


def matrix_text(results: Iterable[Verdict], cells: Iterable[Row] = (), width: int = 0) -> Iterator[Line]:
    """Yield each suite's matrix, then each reason for what is known, not run, refused or not applicable.

    A matrix wider than ``width`` characters continues in a further block, unless ``width`` is 0.
    """
    extra = list(cells)
    for table in tables(results):
        yield ((table.title, "head"),)
        yield from _blocks(table, width)
        for status, title in _TITLES.items():
            for reason, names in by_reason(table.results, status).items():
                yield ((f"  {title}: {reason} [{shortened(names)}]", ""),)
        own_rows = (
            row for row in extra if (row.suite, row.driver) == (table.results[0].suite, table.results[0].driver)
        )
        for (check, reason), names in not_applicable_reasons(own_rows).items():
            yield ((f"  not applicable: {check}: {reason} [{shortened(names)}]", "dim"),)


def _blocks(table: Table, width: int) -> Iterator[Line]:
    label = max(map(len, table.cells), default=0)
    columns = [
        (check, max(len(check), *(len(table.word(cell, check)) for cell in table.cells))) for check in table.checks
    ]
    while columns:
        taken, used = 0, 2 + label
        # At least one column, even if the line is too long.
        while taken < len(columns) and (not taken or not width or used + 2 + columns[taken][1] <= width):
            used += 2 + columns[taken][1]
            taken += 1
        block, columns = columns[:taken], columns[taken:]
        yield _row(" " * label, [(check, "") for check, _ in block], block)
        for cell in table.cells:
            verdicts = [table.found.get((cell, check)) for check, _ in block]
            words = [(one.status.word, one.status.style) if one else ("", "") for one in verdicts]
            # A further block leaves out cells without a verdict in it.
            if taken == len(table.checks) or any(text for text, _ in words):
                yield _row(cell.ljust(label), words, block)


def _row(label: str, words: list[Span], block: list[tuple[str, int]]) -> Line:
    spans: list[Span] = [(f"  {label}", "")]
    for (text, style), (_, width) in zip(words, block, strict=True):
        spans += [("  ", ""), (text, style), (" " * (width - len(text)), "")]
    while spans and not spans[-1][0].strip():
        spans.pop()
    return tuple(span for span in spans if span[0])


def causes_text(results: Iterable[Verdict]) -> Iterator[Line]:
    """Yield each cause of failure with its cells and checks, and the command that reproduces one of them."""
    found = causes(results)
    if found:
        yield (("failures by cause", "head"),)
    for number, cause in enumerate(found[:CAUSES], 1):
        cells = cause.cells
        verdicts, affected = len(cause.results), len(cells)
        counted = f"{verdicts} verdict{'s' * (verdicts > 1)} in {affected} cell{'s' * (affected > 1)}{follows(cause)}"
        yield ((f"  {number}. ", ""), (cause.words, "bad"), (f" {counted}: {cut(cause.headline, HEADLINE)}", ""))
        named = [f"{cell}: {shortened(checks, 6)}" for cell, checks in cells.items()]
        yield ((f"     {'; '.join(named[:3])}{_more(len(named) - 3)}", ""),)
        if cause.reproduce:
            yield ((f"     reproduce: {cause.reproduce}", ""),)
    if len(found) > CAUSES:
        yield ((f"  {unshown(len(found) - CAUSES)}", ""),)


def settings_text(results: Iterable[Verdict]) -> Iterator[Line]:
    """Yield, for each suite that ran settings, those that fail or are refused, with the strategies under which they do."""
    for table in settings_tables(results):
        rows = failing(table)
        if rows:
            words = f"{len(rows)} of {len(table.cells)} settings fail or are refused"
            yield ((f"{table.title}: {words}", "head"),)
        label = max((len(setting) for setting, _ in rows[:SETTINGS]), default=0)
        for setting, verdicts in rows[:SETTINGS]:
            spans: list[Span] = [(f"  {setting.ljust(label)}", "")]
            for strategy, one in verdicts:
                spans += [(f"  {strategy} ", ""), (one.status.word, one.status.style)]
            yield tuple(spans)
        if len(rows) > SETTINGS:
            yield ((f"  and {len(rows) - SETTINGS} more, which the HTML and Markdown reports have", "dim"),)


def follows(cause: Cause) -> str:
    """Return the number of the cause that this one may follow from, as words; empty if there is none."""
    return f", may follow from {cause.follows}" if cause.follows else ""


def runs_text(
    runs: Iterable[dict[str, Any]], timeline: Iterable[dict[str, Any]] = (), gaps: Iterable[dict[str, Any]] = ()
) -> Iterator[Line]:
    """Yield the slowest runs, the fraction of the time in which each device was in use, and why they were not."""
    slow = sorted((run for run in runs if run["seconds"]), key=lambda run: run["seconds"], reverse=True)
    if slow:
        named = (f"{run['seconds']:.1f} s {run['cell']} {run['name']} ({run['driver']})" for run in slow[:SLOWEST])
        yield ((f"slowest runs: {', '.join(named)}", ""),)
    spans = list(timeline)
    length = max((span["end"] for span in spans), default=0) - min((span["begin"] for span in spans), default=0)
    if length >= 1:
        used: dict[str, float] = {}
        for span in spans:
            # Of a GPU that runs share, a place is a part.
            device = span["device"].partition(".place-")[0]
            used[device] = used.get(device, 0.0) + (span["end"] - span["begin"]) * span.get("part", 1)
        named = (f"{device} {seconds / length:.0%}" for device, seconds in sorted(used.items()))
        yield ((f"devices in use, of {length:.0f} s: {', '.join(named)}", ""),)
    idle: dict[str, float] = {}
    for gap in gaps:
        # Whom a run waited for is in the report.
        why = gap["why"] if "waits for" not in gap["why"] else "a run waits for devices"
        idle[why] = idle.get(why, 0.0) + gap["end"] - gap["begin"]
    long = [f"{seconds:.0f} s {why}" for why, seconds in sorted(idle.items(), key=lambda one: -one[1]) if seconds >= 1]
    if long:
        yield ((f"devices not in use, all together: {'; '.join(long)}", ""),)


def counts_text(report: Report) -> str:
    """Return the counts in one line, with this shard and those that are missing.

    Counts of 0 are left out, except those that show a suite that stopped running.
    """
    shard = report.session.get("shard")
    this = f"shard {shard['number']}/{len(shard['plan'])}: " if shard else ""
    found = counts(report)
    parts = [f"{found['selected']} selected", f"{found['ran']} ran", f"{found['skipped']} skipped"]
    if found["unreached"]:
        parts.append(f"{found['unreached']} not reached")
    statuses = [f"{found[status]} {status}" for status in Status if found[status] and status is not Status.SKIPPED]
    return "; ".join(
        (f"{this}{', '.join(parts)}: {', '.join(statuses) or 'nothing'}", *report.session.get("missing", ()))
    )


def shortened(names: list[str], shown: int = 3) -> str:
    """Return the first names, and how many more there are."""
    return ", ".join(names[:shown]) + _more(len(names) - shown)


def _more(left: int) -> str:
    return f" and {left} more" if left > 0 else ""
