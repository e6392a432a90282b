"""Section at the end of pytest's terminal output: matrix, causes, slowest runs, devices, counts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from pytest_distcompat.excerpt import visible
from pytest_distcompat.report import Line, Report, causes_text, counts_text, matrix_text, runs_text

#: The markup of pytest's TerminalWriter for each style of a span.
MARKUP: Mapping[str, Mapping[str, bool]] = {
    "good": {"green": True},
    "known": {"yellow": True},
    "bad": {"red": True, "bold": True},
    "dim": {"light": True},
    "head": {"bold": True},
}


class Summary:
    """Writes the section to pytest's terminal reporter."""

    def __init__(self, terminal: Any) -> None:
        self._terminal = terminal
        # 0 is no limit: a log file has no width. pytest would assume 80 characters.
        has_width = terminal.isatty or "COLUMNS" in os.environ
        self._width = terminal.config.get_terminal_writer().fullwidth if has_width else 0

    def show(self, report: Report, written: Sequence[str], nothing_ran: Sequence[str] = ()) -> None:
        """Write the whole section; ``nothing_ran`` are the lines that say why no cell ran, if none did."""
        self._terminal.section("distributed compatibility")
        for line in matrix_text(report.results, report.rows, self._width):
            self._line(line)
        for line in causes_text(report.results):
            self._line(line)
        runs = report.session.get("runs", 0)
        verdicts = f"{len(report.results)} verdict{'s' * (len(report.results) != 1)}"
        self._terminal.write_line(f"{verdicts} from {runs} {'run' if runs == 1 else 'runs'}")
        self._terminal.write_line(counts_text(report))
        for line in runs_text(report.runs, report.session.get("timeline", ())):
            self._line(line)
        if report.interrupted:
            message = f"{report.session['ending']}: {len(report.unreached)} items were not reached"
            self._terminal.write_line(message, red=True, bold=True)
        baseline = report.session.get("baseline", {})
        for number, text in enumerate(baseline.get("text", ())):
            self._terminal.write_line(visible(text if number else f"since {baseline['file']}: {text}"))
        for text in written:
            self._terminal.write_line(visible(text))
        for text in nothing_ran:
            self._terminal.write_line(visible(text), red=True, bold=True)

    def _line(self, line: Line) -> None:
        for text, style in line:
            self._terminal.write(visible(text), **MARKUP.get(style, {}))
        self._terminal.write("\n")
