"""Section at the end of pytest's terminal output: matrix, settings, causes, slowest runs, devices, counts."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest
from _pytest._code.code import ExceptionRepr

from pytest_distcompat.excerpt import visible
from pytest_distcompat.plugin.selection import strip_group
from pytest_distcompat.report.causes import causes
from pytest_distcompat.report.document import Report
from pytest_distcompat.report.text import Line, causes_text, counts_text, matrix_text, runs_text, settings_text
from pytest_distcompat.status import Verdict

#: The markup of pytest's TerminalWriter for each style of a span.
MARKUP: Mapping[str, Mapping[str, bool]] = {
    "good": {"green": True},
    "known": {"yellow": True},
    "bad": {"red": True, "bold": True},
    "dim": {"light": True},
    "head": {"bold": True},
}


def fold_failures(config: pytest.Config, results: Sequence[Verdict]) -> None:
    """Have pytest show one failure of each cause, in the order of the causes, with the other verdicts beneath it.

    With ``-vv`` it shows all. ``_pdbshown`` is pytest's own attribute for failures that it leaves out of that section, but not
    out of its short summary; ``tests/plugin/test_private_names.py`` fails when that changes.
    """
    terminal: Any = config.pluginmanager.getplugin("terminalreporter")
    if terminal is None or config.get_verbosity() > 1:
        return
    failed = {strip_group(config, one.nodeid): one for one in terminal.stats.get("failed", ()) if one.when == "call"}
    folded: list[Any] = []
    for cause in causes(results):
        reports = [failed.pop(result.nodeid) for result in cause.results if result.nodeid in failed]
        for report in reports[1:]:
            report._pdbshown = True  # noqa: SLF001 - see the docstring
        if len(reports) > 1 and isinstance(reports[0].longrepr, ExceptionRepr):
            verdicts = "\n".join(f"{cell}: {', '.join(checks)}" for cell, checks in cause.cells.items())
            reports[0].longrepr.addsection(f"this cause has {len(reports)} verdicts (-vv shows each)", verdicts)
        folded += reports
    if folded:
        others = [one for one in terminal.stats["failed"] if one not in folded]
        terminal.stats["failed"] = [*others, *folded]


def show(terminal: Any, report: Report, written: Sequence[str], nothing_ran: Sequence[str] = ()) -> None:
    """Write the section; ``nothing_ran`` are the lines that say why no cell ran, if none did."""
    terminal.section("distributed compatibility")
    # 0 is no limit: a log file has no width. pytest would assume 80 characters.
    has_width = terminal.isatty or "COLUMNS" in os.environ
    width = terminal.config.get_terminal_writer().fullwidth if has_width else 0
    verbose = terminal.config.get_verbosity() > 0
    _write_lines(terminal, matrix_text(report.results, report.rows if verbose else (), width))
    if not verbose and any(row.not_applicable for row in report.rows):
        terminal.write_line("an empty place: the check is not applicable there (-v gives the reasons)")
    _write_lines(terminal, settings_text(report.results))
    _write_lines(terminal, causes_text(report.results))
    runs = report.session.get("runs", 0)
    verdicts = f"{len(report.results)} verdict{'s' * (len(report.results) != 1)}"
    terminal.write_line(f"{verdicts} from {runs} {'run' if runs == 1 else 'runs'}")
    terminal.write_line(visible(counts_text(report)))
    for lines in terminal.config.hook.pytest_distcompat_summary(report=report):
        for line in lines:
            terminal.write_line(visible(line))
    # The page has the timeline of the devices.
    timeline, gaps = (report.session.get(name, ()) if verbose else () for name in ("timeline", "gaps"))
    _write_lines(terminal, runs_text(report.runs, timeline, gaps))
    if report.interrupted:
        message = f"{report.session['ending']}: {len(report.unreached)} items were not reached"
        terminal.write_line(message, red=True, bold=True)
    baseline = report.session.get("baseline", {})
    for number, text in enumerate(baseline.get("text", ())):
        terminal.write_line(visible(text if number else f"since {baseline['file']}: {text}"))
    for text in written:
        terminal.write_line(visible(text))
    for text in nothing_ran:
        terminal.write_line(visible(text), red=True, bold=True)


def _write_lines(terminal: Any, lines: Iterable[Line]) -> None:
    for line in lines:
        for text, style in line:
            terminal.write(visible(text), **MARKUP.get(style, {}))
        terminal.write("\n")
