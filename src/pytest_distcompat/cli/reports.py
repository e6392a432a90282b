"""``diff``, ``merge``, ``report``, ``trend``: commands for the JSON reports of earlier sessions.

A session with ``--distcompat-report last.json`` writes a report: its *verdicts* (passed, failed,
...), each of one check in one configuration. ``cli.main`` calls ``add`` for the parser of the
command ``distcompat``, and then the function of the subcommand, which returns the exit code. The
work is done in ``report/``; the functions here read files, call it, and print.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pytest_distcompat.cli.output import WRITTEN, report_file, write, write_reports
from pytest_distcompat.excerpt import visible
from pytest_distcompat.failures import UsageProblem
from pytest_distcompat.report.compare import compare
from pytest_distcompat.report.document import Report
from pytest_distcompat.report.html import trend_html
from pytest_distcompat.report.merge import merge
from pytest_distcompat.report.text import counts_text
from pytest_distcompat.report.trend import trend


def add(commands: Any) -> None:
    """Add the subcommands; ``commands`` is what argparse's ``add_subparsers`` returned."""
    diff = commands.add_parser(
        "diff",
        help="what is newly broken, newly fixed, newly missing",
        description="Compare two reports. "
        "Exit code 0: nothing is newly broken or newly missing; 1: something is.",
    )
    diff.add_argument("before", type=Path, metavar="LAST.json")
    diff.add_argument("after", type=Path, metavar="TODAY.json")
    diff.add_argument(
        "--allow-missing", action="store_true", help="what is missing today is no news"
    )
    diff.add_argument("--json", action="store_true", help="write the differences as JSON")
    diff.set_defaults(call=_diff)
    merged = commands.add_parser(
        "merge",
        help="the reports of several jobs as one",
        description="Merge reports. "
        "Of several verdicts on the same check in the same cell, the worst counts. "
        "Exit code 1: the report of a shard (--distcompat-shard) is missing.",
    )
    merged.add_argument("reports", type=Path, nargs="+", metavar="REPORT.json")
    _add_output(merged)
    merged.set_defaults(call=_merge, whole=True)
    shown = commands.add_parser(
        "report",
        help="a report in other formats",
        description="Write a JSON report in other formats.",
    )
    shown.add_argument("reports", type=Path, nargs=1, metavar="REPORT.json")
    _add_output(shown)
    shown.set_defaults(call=_merge, whole=False)
    nights = commands.add_parser(
        "trend",
        help="many nights on one page: broken, flaky, fixed",
        description="Write a page of all JSON reports in a directory and below it, "
        "in the order in which they began.",
    )
    nights.add_argument("directory", type=Path, metavar="DIR")
    nights.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("trend.html"),
        metavar="FILE",
        help="default: %(default)s",
    )
    nights.set_defaults(call=_trend)


def _add_output(command: argparse.ArgumentParser) -> None:
    """Give a command that writes reports the option for their files."""
    command.add_argument(
        "-o",
        "--output",
        type=report_file,
        required=True,
        action="append",
        metavar="FILE",
        help=WRITTEN,
    )


def _diff(options: argparse.Namespace) -> int:
    """Print what differs between two reports; return 1 if something is newly broken or missing."""
    differences = compare(Report.read(options.before), Report.read(options.after))
    if options.json:
        document = differences.to_json(str(options.before))
        print(json.dumps(document, indent=1))
    else:
        print("\n".join(differences.lines()))
    if differences.broken:
        return 1
    return int(bool(differences.missing) and not options.allow_missing)


def _merge(options: argparse.Namespace) -> int:
    """Write one or more reports as one, in other formats: the commands ``merge`` and ``report``.

    Returns:
        1 if ``merge`` lacks the report of a shard, else 0. A shard is the part of the tests that
        one machine ran (``--distcompat-shard 2/3``).
    """
    reports = [Report.read(path) for path in options.reports]
    report = reports[0]
    # ``whole`` is true for ``merge``. It merges a shard even alone: that shows which ones are
    # missing.
    is_shard = options.whole and "shard" in report.session
    if len(reports) > 1 or is_shard:
        report = merge(reports)
    write_reports(options.output, report)
    print(visible(counts_text(report)))
    return int(options.whole and bool(report.session.get("missing")))


def _trend(options: argparse.Namespace) -> int:
    """Write the page of many nights, and print which checks are broken and which are flaky."""
    # The generator fills the list while ``trend`` reads the reports, so it is looked at afterwards.
    problems: list[str] = []
    shown = trend(_nights(options.directory, problems))
    if problems:
        raise UsageProblem("\n".join(problems))
    if not shown.nights:
        raise UsageProblem(f"{options.directory}: no *.json is there")
    write(options.output, trend_html(shown))
    for line in shown.lines():
        print(line)
    print(f"written: {options.output}")
    return 0


def _nights(directory: Path, problems: list[str]) -> Iterator[Report]:
    """Yield the reports in a directory; add what is wrong with a file to ``problems``."""
    for path in sorted(directory.rglob("*.json")):
        try:
            report = Report.read(path)
        except UsageProblem as problem:
            problems.append(str(problem))
            continue
        if report.session.get("began"):
            yield report
        else:
            problems.append(f"{path}: does not say when it began")
