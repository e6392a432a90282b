"""Terminal report: lines of spans, each a text with the name of its style."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from pytest_distcompat.places import device_of
from pytest_distcompat.report.causes import Cause, causes, unshown
from pytest_distcompat.report.document import Report, counts
from pytest_distcompat.report.result import Row, Table, by_reason, not_applicable_reasons, tables
from pytest_distcompat.report.settings import failing, settings_tables
from pytest_distcompat.status import Status, Verdict, all_statuses, explained_statuses

#: A text and its style: ``good``, ``known``, ``bad``, ``dim``, ``head`` or nothing.
Span = tuple[str, str]
Line = tuple[Span, ...]
#: An entry of a report's runs, timeline or gaps.
_Entry = dict[str, Any]

#: How many of the slowest runs, and of the causes of failure, are shown.
SLOWEST = 5
CAUSES = 20
#: How many of the settings that fail or are refused are shown.
SETTINGS = 12
#: The longest headline in the list of causes, in characters.
HEADLINE = 240


def _line(text: str, style: str = "") -> Line:
    """Return a line of one span."""
    return ((text, style),)


def cut(text: str, length: int) -> str:
    """Cut the text to that length."""
    if len(text) <= length:
        return text
    return f"{text[: length - 3]}..."


def matrix_text(
    results: Iterable[Verdict], cells: Iterable[Row] = (), width: int = 0
) -> Iterator[Line]:
    """Yield each suite's matrix, then each reason for what is known, not run, refused or not applicable.

    A matrix wider than ``width`` characters continues in a further block, unless ``width`` is 0.
    """
    all_rows = list(cells)
    for table in tables(results):
        yield _line(table.title, "head")
        yield from _blocks(table, width)
        for status in explained_statuses():
            for reason, names in by_reason(table.results, status).items():
                yield _line(f"  {status.heading}: {reason} [{shortened(names)}]")
        for (check, reason), names in not_applicable_reasons(_rows_of(table, all_rows)).items():
            yield _line(f"  not applicable: {check}: {reason} [{shortened(names)}]", "dim")


def _rows_of(table: Table, all_rows: Iterable[Row]) -> list[Row]:
    """Return the rows of the table's suite."""
    first = table.results[0]
    rows: list[Row] = []
    for row in all_rows:
        if row.suite == first.suite and row.driver == first.driver:
            rows.append(row)
    return rows


@dataclass(frozen=True)
class _Column:
    """A column of a matrix: a check, and the width of its longest word."""

    check: str
    width: int


def _blocks(table: Table, width: int) -> Iterator[Line]:
    """Yield the matrix, in as many blocks as its columns need at this width."""
    label_width = max((len(cell) for cell in table.cells), default=0)
    blocks = _divided(_columns(table), label_width, width)
    for block in blocks:
        header = [(column.check, "") for column in block]
        yield _row(" " * label_width, header, block)
        for cell in table.cells:
            words = [_word(table, cell, column.check) for column in block]
            has_verdict = any(text for text, _ in words)
            # A further block leaves out cells without a verdict in it.
            if len(blocks) == 1 or has_verdict:
                yield _row(cell.ljust(label_width), words, block)


def _columns(table: Table) -> list[_Column]:
    columns = []
    for check in table.checks:
        words = [table.word(cell, check) for cell in table.cells]
        longest = max(len(word) for word in (check, *words))
        columns.append(_Column(check, longest))
    return columns


def _divided(columns: Iterable[_Column], label_width: int, width: int) -> list[list[_Column]]:
    """Divide the columns into blocks no wider than ``width``, 0 for any width; each has at least one column."""
    blocks: list[list[_Column]] = []
    used = 0
    for column in columns:
        # Two spaces before each.
        needed = 2 + column.width
        if blocks and (not width or used + needed <= width):
            blocks[-1].append(column)
            used += needed
        else:
            blocks.append([column])
            used = 2 + label_width + needed
    return blocks


def _word(table: Table, cell: str, check: str) -> Span:
    verdict = table.verdicts.get((cell, check))
    if verdict is None:
        return ("", "")
    return (verdict.status.word, verdict.status.style)


def _row(label: str, words: Iterable[Span], block: Iterable[_Column]) -> Line:
    """Return a row of a block, without spaces at its end."""
    spans: list[Span] = [(f"  {label}", "")]
    for (text, style), column in zip(words, block, strict=True):
        padding = " " * (column.width - len(text))
        spans += [("  ", ""), (text, style), (padding, "")]
    while spans and not spans[-1][0].strip():
        spans.pop()
    with_text: list[Span] = []
    for text, style in spans:
        if text:
            with_text.append((text, style))
    return tuple(with_text)


def causes_text(results: Iterable[Verdict]) -> Iterator[Line]:
    """Yield each cause of failure with its cells and checks, and the command that reproduces one of them."""
    all_causes = causes(results)
    if all_causes:
        yield _line("failures by cause", "head")
    for number, cause in enumerate(all_causes[:CAUSES], 1):
        cells = cause.cells
        verdicts = _counted(len(cause.results), "verdict")
        affected = _counted(len(cells), "cell")
        headline = cut(cause.headline, HEADLINE)
        yield (
            (f"  {number}. ", ""),
            (cause.words, "bad"),
            (f" {verdicts} in {affected}{follows(cause)}: {headline}", ""),
        )
        cell_texts = [f"{cell}: {shortened(checks, 6)}" for cell, checks in cells.items()]
        shown = "; ".join(cell_texts[:3])
        yield _line(f"     {shown}{_more(len(cell_texts) - 3)}")
        if cause.reproduce:
            yield _line(f"     reproduce: {cause.reproduce}")
    if len(all_causes) > CAUSES:
        yield _line(f"  {unshown(len(all_causes) - CAUSES)}")


def _counted(count: int, noun: str) -> str:
    """Return a number with its noun, in the plural if it has to be."""
    if count > 1:
        return f"{count} {noun}s"
    return f"{count} {noun}"


def settings_text(results: Iterable[Verdict]) -> Iterator[Line]:
    """Yield, for each suite that ran settings, those that fail or are refused, with the strategies under which they do."""
    for table in settings_tables(results):
        rows = failing(table)
        if not rows:
            continue
        title = f"{table.title}: {len(rows)} of {len(table.cells)} settings fail or are refused"
        yield _line(title, "head")
        label_width = max(len(row.setting) for row in rows[:SETTINGS])
        for row in rows[:SETTINGS]:
            spans: list[Span] = [(f"  {row.setting.ljust(label_width)}", "")]
            for strategy, verdict in row.verdicts.items():
                spans.append((f"  {strategy} ", ""))
                spans.append((verdict.status.word, verdict.status.style))
            yield tuple(spans)
        if len(rows) > SETTINGS:
            yield _line(
                f"  and {len(rows) - SETTINGS} more, which the HTML and Markdown reports have",
                "dim",
            )


def follows(cause: Cause) -> str:
    """Return the number of the cause that this one may follow from, as words; empty if there is none."""
    if not cause.follows:
        return ""
    return f", may follow from {cause.follows}"


def runs_text(
    runs: Iterable[_Entry],
    timeline: Iterable[_Entry] = (),
    gaps: Iterable[_Entry] = (),
) -> Iterator[Line]:
    """Yield the slowest runs, the fraction of the time in which each device was in use, and why they were not."""
    yield from _slowest_runs(runs)
    yield from _device_use(timeline)
    yield from _idle_devices(gaps)


def _slowest_runs(runs: Iterable[_Entry]) -> Iterator[Line]:
    timed_runs = []
    for run in runs:
        if run["seconds"]:
            timed_runs.append(run)
    timed_runs.sort(key=lambda run: run["seconds"], reverse=True)
    texts = [_run_text(run) for run in timed_runs[:SLOWEST]]
    if texts:
        yield _line(f"slowest runs: {', '.join(texts)}")


def _run_text(run: _Entry) -> str:
    return f"{run['seconds']:.1f} s {run['cell']} {run['name']} ({run['driver']})"


def _device_use(timeline: Iterable[_Entry]) -> Iterator[Line]:
    """Yield the fraction of the time, from the first lease to the last, in which each device was leased."""
    leases = list(timeline)
    begin = min((lease["begin"] for lease in leases), default=0)
    end = max((lease["end"] for lease in leases), default=0)
    length = end - begin
    if length < 1:
        return
    used: dict[str, float] = {}
    for lease in leases:
        # Of a GPU that runs share, a place is a part.
        device = device_of(lease["device"])
        seconds = (lease["end"] - lease["begin"]) * lease.get("part", 1)
        used[device] = used.get(device, 0.0) + seconds
    fractions = [f"{device} {seconds / length:.0%}" for device, seconds in sorted(used.items())]
    yield _line(f"devices in use, of {length:.0f} s: {', '.join(fractions)}")


def _idle_devices(gaps: Iterable[_Entry]) -> Iterator[Line]:
    """Yield the reasons for which devices were not in use, the longest first, without those of less than a second."""
    idle: dict[str, float] = {}
    for gap in gaps:
        reason = gap["why"]
        if "waits for" in reason:
            # Whom a run waited for is in the report.
            reason = "a run waits for devices"
        idle[reason] = idle.get(reason, 0.0) + gap["end"] - gap["begin"]
    longest_first = sorted(idle.items(), key=lambda item: -item[1])
    texts = [f"{seconds:.0f} s {reason}" for reason, seconds in longest_first if seconds >= 1]
    if texts:
        yield _line(f"devices not in use, all together: {'; '.join(texts)}")


def counts_text(report: Report) -> str:
    """Return the counts in one line, with this shard and those that are missing.

    Counts of 0 are left out, except those that show a suite that stopped running.
    """
    count_by_name = counts(report)
    parts = [f"{count_by_name[name]} {name}" for name in ("selected", "ran", "skipped")]
    if count_by_name["unreached"]:
        parts.append(f"{count_by_name['unreached']} not reached")
    other_statuses = []
    for status in all_statuses():
        if status is not Status.SKIPPED:
            other_statuses.append(status)
    statuses = []
    for status in other_statuses:
        if count_by_name[status]:
            statuses.append(f"{count_by_name[status]} {status}")
    text = f"{', '.join(parts)}: {', '.join(statuses) or 'nothing'}"
    shard = report.session.get("shard")
    if shard:
        text = f"shard {shard['number']}/{len(shard['plan'])}: {text}"
    return "; ".join((text, *report.session.get("missing", ())))


def shortened(names: list[str], shown: int = 3) -> str:
    """Return the first names, and how many more there are."""
    return ", ".join(names[:shown]) + _more(len(names) - shown)


def _more(count: int) -> str:
    if count <= 0:
        return ""
    return f" and {count} more"
