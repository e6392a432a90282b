"""Terminal report: the results of a session as lines of text with styles.

``plugin.reporting.summary`` writes these lines at the end of pytest's output, in colours. Other
formats use single functions, as ``counts_text`` and ``shortened``. A line is a tuple of *spans*,
each a text with the name of its style: ``(("  1. ", ""), ("FAIL", "bad"), (" 2 verdicts", ""))``.

The results are *verdicts* (passed, failed, known, ...), each of one *check* in one *cell* of a
suite. A cell is a configuration of the trainer, as ``fsdp2-fp32-w2``: strategy, precision, 2 ranks.
A driver is the trainer, as a class. A suite is shown as a matrix, with a row for each cell and a
column for each check::

    TestMyTrainer (driver my_driver)
                   active  names  resume
      ddp-fp32-w2  ok      ok     FAIL
      known: https://github.com/... [fsdp2-fp32-w2:resume]
"""

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
#: An entry of a report's runs, timeline or gaps, which are lists of dictionaries (``schema.json``).
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
    """Yield each suite's matrix, then the reasons for what is known, not run or refused.

    Args:
        results: The verdicts of all suites.
        cells: What is known about the cells; with it the reasons for which checks are not
            applicable are listed too.
        width: The width of the terminal. A wider matrix continues in a further block. 0 for no
            limit.
    """
    all_rows = list(cells)
    for table in tables(results):
        yield _line(table.title, "head")
        yield from _blocks(table, width)
        for status in explained_statuses():
            for reason, names in by_reason(table.results, status).items():
                affected = shortened(names)
                yield _line(f"  {status.heading}: {reason} [{affected}]")
        cells_by_reason = not_applicable_reasons(_rows_of(table, all_rows))
        for (check, reason), names in cells_by_reason.items():
            affected = shortened(names)
            yield _line(f"  not applicable: {check}: {reason} [{affected}]", "dim")


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
    """Yield the matrix, in as many blocks of columns as it needs at this width."""
    label_width = max(map(len, table.cells), default=0)
    blocks = _divided(_columns(table), label_width, width)
    for block in blocks:
        header = [_plain(column.check) for column in block]
        yield _row(" " * label_width, header, block)
        for cell in table.cells:
            words = [_word(table, cell, column.check) for column in block]
            has_verdict = any(text for text, _ in words)
            # A further block leaves out cells without a verdict in it.
            if len(blocks) == 1 or has_verdict:
                yield _row(cell.ljust(label_width), words, block)


def _plain(text: str) -> Span:
    """Return a text without a style."""
    return (text, "")


def _columns(table: Table) -> list[_Column]:
    """Return a column for each check of a matrix."""
    columns = []
    for check in table.checks:
        longest = len(check)
        for cell in table.cells:
            word = table.word(cell, check)
            longest = max(longest, len(word))
        columns.append(_Column(check, longest))
    return columns


def _divided(columns: Iterable[_Column], label_width: int, width: int) -> list[list[_Column]]:
    """Divide the columns into blocks that are no wider than ``width`` characters.

    Each block has at least one column. A width of 0 stands for any width.
    """
    blocks: list[list[_Column]] = []
    used = 0
    for column in columns:
        # Two spaces stand before each column.
        needed = 2 + column.width
        if blocks and (not width or used + needed <= width):
            blocks[-1].append(column)
            used += needed
        else:
            blocks.append([column])
            used = 2 + label_width + needed
    return blocks


def _word(table: Table, cell: str, check: str) -> Span:
    """Return what stands at a place of the matrix; an empty text if there is no verdict."""
    verdict = table.verdicts.get((cell, check))
    if verdict is None:
        return _plain("")
    return (verdict.status.word, verdict.status.style)


def _row(label: str, words: Iterable[Span], block: Iterable[_Column]) -> Line:
    """Return a row of a block, without spaces at its end.

    Args:
        label: What stands at the left: a cell, or as many spaces.
        words: What stands in each column.
        block: The columns.
    """
    spans = [_plain(f"  {label}")]
    for word, column in zip(words, block, strict=True):
        text, _ = word
        padding = " " * (column.width - len(text))
        spans += [_plain("  "), word, _plain(padding)]
    while spans and not spans[-1][0].strip():
        spans.pop()
    return tuple((text, style) for text, style in spans if text)


def causes_text(results: Iterable[Verdict]) -> Iterator[Line]:
    """Yield each cause of failure with its cells and checks, and a command that reproduces it.

    Failures have one cause if their messages are equal, numbers aside.
    """
    all_causes = causes(results)
    if all_causes:
        yield _line("failures by cause", "head")
    for number, cause in enumerate(all_causes[:CAUSES], 1):
        verdicts = _counted(len(cause.results), "verdict")
        cells = _counted(len(cause.cells), "cell")
        counted = f"{verdicts} in {cells}{follows(cause)}"
        headline = cut(cause.headline, HEADLINE)
        yield (
            _plain(f"  {number}. "),
            (cause.words, "bad"),
            _plain(f" {counted}: {headline}"),
        )
        cell_texts: list[str] = []
        for cell, checks in cause.cells.items():
            cell_texts.append(f"{cell}: {shortened(checks, 6)}")
        shown = "; ".join(cell_texts[:3])
        more = _more(len(cell_texts) - 3)
        yield _line(f"     {shown}{more}")
        if cause.reproduce:
            yield _line(f"     reproduce: {cause.reproduce}")
    if len(all_causes) > CAUSES:
        yield _line(f"  {unshown(len(all_causes) - CAUSES)}")


def _counted(count: int, noun: str) -> str:
    """Return a number with its noun: ``1 cell``, ``2 cells``."""
    if count > 1:
        return f"{count} {noun}s"
    return f"{count} {noun}"


def settings_text(results: Iterable[Verdict]) -> Iterator[Line]:
    """Yield, for each suite that ran settings, those that fail or are refused.

    A setting is a field of a library that some cells set, as ``TrainingArguments.optim=sgd``. Each
    line has the strategies under which it fails or is refused, with the word of the verdict.
    """
    for table in settings_tables(results):
        rows = failing(table)
        if not rows:
            continue
        shown = rows[:SETTINGS]
        counted = f"{len(rows)} of {len(table.cells)} settings"
        yield _line(f"{table.title}: {counted} fail or are refused", "head")
        label_width = max(len(row.setting) for row in shown)
        for row in shown:
            label = row.setting.ljust(label_width)
            spans = [_plain(f"  {label}")]
            for strategy, verdict in row.verdicts.items():
                spans.append(_plain(f"  {strategy} "))
                spans.append((verdict.status.word, verdict.status.style))
            yield tuple(spans)
        if len(rows) > SETTINGS:
            yield _line(
                f"  and {len(rows) - SETTINGS} more, which the HTML and Markdown reports have",
                "dim",
            )


def follows(cause: Cause) -> str:
    """Return ``, may follow from 2`` if the cause may follow from cause 2; else an empty text."""
    if not cause.follows:
        return ""
    return f", may follow from {cause.follows}"


def runs_text(
    runs: Iterable[_Entry],
    timeline: Iterable[_Entry] = (),
    gaps: Iterable[_Entry] = (),
) -> Iterator[Line]:
    """Yield the slowest runs, how much of the time each device was in use, and why it was not.

    A run is one process group from start to end. It leases its devices for that time.

    Args:
        runs: The runs of a report, with ``seconds``, ``cell``, ``name`` and ``driver``.
        timeline: An entry for each device of each lease, with ``device``, ``begin``, ``end`` (in
            seconds since the session began) and perhaps ``part`` (the fraction of the device).
        gaps: The times in which devices were not leased, with ``begin``, ``end`` and ``why``.
    """
    yield from _slowest_runs(runs)
    yield from _device_use(timeline)
    yield from _idle_devices(gaps)


def _slowest_runs(runs: Iterable[_Entry]) -> Iterator[Line]:
    """Yield a line about the slowest runs; none if no run has a duration."""
    # A run that did not end has no duration.
    timed_runs = [run for run in runs if run["seconds"]]
    timed_runs.sort(key=lambda run: run["seconds"], reverse=True)
    texts = [_run_text(run) for run in timed_runs[:SLOWEST]]
    if texts:
        yield _line(f"slowest runs: {', '.join(texts)}")


def _run_text(run: _Entry) -> str:
    """Return a run in a few words: ``6.9 s ddp-fp32-w2 train (accelerate)``."""
    length = f"{run['seconds']:.1f} s"
    run_in_cell = f"{run['cell']} {run['name']}"
    return f"{length} {run_in_cell} ({run['driver']})"


def _device_use(timeline: Iterable[_Entry]) -> Iterator[Line]:
    """Yield the fraction of the time in which each device was leased.

    The time begins with the first lease and ends with the last.
    """
    begins: list[float] = []
    ends: list[float] = []
    used: dict[str, float] = {}
    for lease in timeline:
        begins.append(lease["begin"])
        ends.append(lease["end"])
        # A GPU that runs share is leased in places, each a part of it.
        device = device_of(lease["device"])
        lease_length = lease["end"] - lease["begin"]
        seconds = lease_length * lease.get("part", 1)
        used[device] = used.get(device, 0.0) + seconds
    length = max(ends, default=0) - min(begins, default=0)
    # Fractions of less than a second say nothing.
    if length < 1:
        return
    fractions: list[str] = []
    for device, seconds in sorted(used.items()):
        fractions.append(f"{device} {seconds / length:.0%}")
    texts = ", ".join(fractions)
    yield _line(f"devices in use, of {length:.0f} s: {texts}")


def _idle_devices(gaps: Iterable[_Entry]) -> Iterator[Line]:
    """Yield the reasons for which devices were not in use, the longest first.

    Reasons for less than a second are left out.
    """
    idle: dict[str, float] = {}
    for gap in gaps:
        reason = gap["why"]
        if "waits for" in reason:
            # One line for all runs that waited; for which other run each did, is in the report's
            # files.
            reason = "a run waits for devices"
        idle_before = idle.get(reason, 0.0)
        idle[reason] = idle_before + gap["end"] - gap["begin"]
    texts: list[str] = []
    for reason in sorted(idle, key=lambda reason: -idle[reason]):
        seconds = idle[reason]
        if seconds >= 1:
            texts.append(f"{seconds:.0f} s {reason}")
    if texts:
        yield _line(f"devices not in use, all together: {'; '.join(texts)}")


def counts_text(report: Report) -> str:
    """Return the counts in one line: ``42 selected, 42 ran, 0 skipped: 40 passed, 2 known``.

    Counts of 0 are left out, except the first three, which show a suite that stopped running. If
    the report is of a shard (one machine's part of the tests), its number comes first. In a merged
    report the shards without a report come last.
    """
    count_by_name = counts(report)
    parts: list[str] = []
    for name in ("selected", "ran", "skipped"):
        parts.append(f"{count_by_name[name]} {name}")
    if count_by_name["unreached"]:
        parts.append(f"{count_by_name['unreached']} not reached")
    statuses: list[str] = []
    for status in all_statuses():
        if status is not Status.SKIPPED and count_by_name[status]:
            statuses.append(f"{count_by_name[status]} {status}")
    outcome = ", ".join(statuses) or "nothing"
    text = f"{', '.join(parts)}: {outcome}"
    shard = report.session.get("shard")
    if shard:
        shards = len(shard["plan"])
        text = f"shard {shard['number']}/{shards}: {text}"
    missing_shards = report.session.get("missing", ())
    return "; ".join((text, *missing_shards))


def shortened(names: list[str], shown: int = 3) -> str:
    """Return the first ``shown`` names, and how many more there are: ``a, b, c and 2 more``."""
    first_names = ", ".join(names[:shown])
    return first_names + _more(len(names) - shown)


def _more(count: int) -> str:
    """Return `` and 2 more``; an empty text for 0 or less."""
    if count <= 0:
        return ""
    return f" and {count} more"
