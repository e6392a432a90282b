"""Section ``distributed compatibility`` at the end of pytest's terminal output.

It has the matrix of *verdicts* (passed, failed, known, ...) of each suite, *causes* of failures,
counts and more. ``report.text`` makes the lines, without colours; this module writes them with
pytest's terminal reporter. ``Results`` calls both functions, in the process that has the terminal:

- ``fold_failures`` at the end of the session, before pytest prints its own section of failures. A
  suite has a test item for each *check* in each *cell* (configuration), and one crash fails all
  checks of a cell. So pytest prints one traceback for each cause instead of one for each item.
- ``show`` in pytest's terminal summary.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest
from _pytest._code.code import ExceptionRepr

from pytest_distcompat.excerpt import visible
from pytest_distcompat.plugin.selection import strip_group
from pytest_distcompat.report.causes import Cause, causes
from pytest_distcompat.report.document import Report
from pytest_distcompat.report.text import (
    Line,
    causes_text,
    counts_text,
    matrix_text,
    runs_text,
    settings_text,
)
from pytest_distcompat.status import Verdict

#: The styles of ``report.text`` to the markup of pytest's TerminalWriter.
MARKUP: Mapping[str, Mapping[str, bool]] = {
    "good": {"green": True},
    "known": {"yellow": True},
    "bad": {"red": True, "bold": True},
    "dim": {"light": True},
    "head": {"bold": True},
}


def fold_failures(config: pytest.Config, results: Sequence[Verdict]) -> None:
    """Have pytest show one failure of each cause, in the order of the causes.

    The other verdicts of the cause are listed beneath it. With ``-vv`` pytest shows all failures.
    pytest leaves reports with its attribute ``_pdbshown`` out of its section of failures, but not
    out of its short summary; ``tests/plugin/test_private_names.py`` fails when that changes.

    Args:
        config: The configuration of pytest.
        results: The verdicts of the session.
    """
    terminal: Any = config.pluginmanager.getplugin("terminalreporter")
    if terminal is None or config.get_verbosity() > 1:
        return
    # Node id to pytest's report of a failed call.
    failed = {}
    for report in terminal.stats.get("failed", ()):
        if report.when == "call":
            failed[strip_group(config, report.nodeid)] = report
    # The reports of failed verdicts, cause by cause.
    folded: list[Any] = []
    for cause in causes(results):
        reports = []
        for result in cause.results:
            if result.nodeid in failed:
                reports.append(failed.pop(result.nodeid))
        _fold(cause, reports)
        folded += reports
    # pytest shows failures in the order of this list: ordinary tests first, then the causes.
    if folded:
        others = []
        for report in terminal.stats["failed"]:
            if report not in folded:
                others.append(report)
        terminal.stats["failed"] = [*others, *folded]


def _fold(cause: Cause, reports: Sequence[Any]) -> None:
    """Have pytest show only the first report of a cause, with a list of all its verdicts."""
    for report in reports[1:]:
        report._pdbshown = True  # noqa: SLF001 - see fold_failures
    if len(reports) > 1 and isinstance(reports[0].longrepr, ExceptionRepr):
        verdicts = []
        for cell, checks in cause.cells.items():
            checks_of_cell = ", ".join(checks)
            verdicts.append(f"{cell}: {checks_of_cell}")
        title = f"this cause has {len(reports)} verdicts (-vv shows each)"
        reports[0].longrepr.addsection(title, "\n".join(verdicts))


def show(
    terminal: Any, report: Report, written: Sequence[str], nothing_ran: Sequence[str] = ()
) -> None:
    """Write the section into pytest's terminal output.

    Args:
        terminal: pytest's terminal reporter.
        report: The report of the session.
        written: Lines about the cells that the profile leaves out, and about report files.
        nothing_ran: The lines that say why no cell ran, if none did.
    """
    terminal.section("distributed compatibility")
    verbose = terminal.config.get_verbosity() > 0
    _show_matrix(terminal, report, verbose=verbose)
    _write_lines(terminal, settings_text(report.results))
    _write_lines(terminal, causes_text(report.results))
    _show_counts(terminal, report)
    _show_runs(terminal, report, verbose=verbose)
    if report.interrupted:
        ending = report.session["ending"]
        message = f"{ending}: {len(report.unreached)} items were not reached"
        terminal.write_line(message, red=True, bold=True)
    _show_comparison(terminal, report)
    for text in written:
        terminal.write_line(visible(text))
    for text in nothing_ran:
        terminal.write_line(visible(text), red=True, bold=True)


def _show_matrix(terminal: Any, report: Report, *, verbose: bool) -> None:
    """Write the matrix of each suite: a row for each cell, a column for each check."""
    # 0 is no limit: a log file has no width. pytest would assume 80 characters.
    width = 0
    if terminal.isatty or "COLUMNS" in os.environ:
        width = terminal.config.get_terminal_writer().fullwidth
    rows = report.rows if verbose else ()
    _write_lines(terminal, matrix_text(report.results, rows, width))
    if not verbose and any(row.not_applicable for row in report.rows):
        terminal.write_line(
            "an empty place: the check is not applicable there (-v gives the reasons)"
        )


def _show_counts(terminal: Any, report: Report) -> None:
    """Write how many verdicts there are, from how many runs, and the lines of extensions.

    A run is one process group from start to end; checks share runs.
    """
    runs = report.session.get("runs", 0)
    verdicts = len(report.results)
    verdicts_text = f"{verdicts} verdict" if verdicts == 1 else f"{verdicts} verdicts"
    runs_text = f"{runs} run" if runs == 1 else f"{runs} runs"
    terminal.write_line(f"{verdicts_text} from {runs_text}")
    terminal.write_line(visible(counts_text(report)))
    for lines in terminal.config.hook.pytest_distcompat_summary(report=report):
        for line in lines:
            terminal.write_line(visible(line))


def _show_runs(terminal: Any, report: Report, *, verbose: bool) -> None:
    """Write the slowest runs; with -v also how much devices were in use."""
    timeline: Sequence[Any] = ()
    gaps: Sequence[Any] = ()
    # Without -v the HTML page has the timeline of the devices.
    if verbose:
        timeline = report.session.get("timeline", ())
        gaps = report.session.get("gaps", ())
    _write_lines(terminal, runs_text(report.runs, timeline, gaps))


def _show_comparison(terminal: Any, report: Report) -> None:
    """Write what changed since the baseline, the report of an earlier session, if there is one."""
    baseline = report.session.get("baseline", {})
    for number, text in enumerate(baseline.get("text", ())):
        line = text
        if number == 0:
            line = f"since {baseline['file']}: {text}"
        terminal.write_line(visible(line))


def _write_lines(terminal: Any, lines: Iterable[Line]) -> None:
    """Write lines of spans in colours, with control characters escaped."""
    for line in lines:
        for text, style in line:
            terminal.write(visible(text), **MARKUP.get(style, {}))
        terminal.write("\n")
