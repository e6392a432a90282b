"""Items of suites as their node ids and reports show them, in the process that reports.

A suite is a subclass of ``CompatSuite``. It has an item for each check in each cell, such as
``tests/test_a.py::TestMyTrainer::test[fsdp2-fp32-w2:names]``. Under xdist the process that reports
has no items, only their node ids and the reports that workers send. So ``Results`` reads suite,
cell and check from the node id. It also needs a verdict for an item that failed before its check
ran, in a fixture or because its worker died: ``verdict_without_check`` makes one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest

from pytest_distcompat.report.document import facets
from pytest_distcompat.status import Status, Verdict

#: How the node id of the only item of a suite ends, if no cell of the suite is selected. The item
#: is skipped with the reason.
NO_CELL = "::test[no-cell]"
#: The node id of a suite's item: the node id of the suite, the cell, the check.
_ITEM = re.compile(r"(?P<place>.+)::test\[(?P<cell>[\w-]+):(?P<check>\w+)\]")


@dataclass(frozen=True)
class SuiteItem:
    """What the node id of a suite's item says."""

    #: The node id of the suite, as ``tests/test_a.py::TestMyTrainer``.
    suite: str
    #: The id of the cell, as ``fsdp2-fp32-w2``.
    cell: str
    #: The name of the check, as ``names``.
    check: str


def parse_suite_item(nodeid: str) -> SuiteItem | None:
    """Return what the node id of a suite's item says; None for any other test."""
    match = _ITEM.fullmatch(nodeid)
    # A user's own test may be called ``test`` and have a parameter with a colon. Only the id of a
    # cell has facets: strategy, precision and so on.
    if match is None or not facets(match["cell"]):
        return None
    from pytest_distcompat.checks import all_check_names

    if match["check"] not in all_check_names():
        return None
    return SuiteItem(match["place"], match["cell"], match["check"])


def verdict_without_check(nodeid: str, report: pytest.TestReport) -> Verdict:
    """Return the verdict of an item that failed or was skipped before its check had one.

    Args:
        nodeid: The node id of the item, which is one of a suite.
        report: pytest's report of a failure or a skip, in whatever phase.
    """
    item = parse_suite_item(nodeid)
    assert item is not None
    if report.skipped:
        status = Status.SKIPPED
        text = report.longreprtext
        # For a skip pytest has (path, line, reason).
        if isinstance(report.longrepr, tuple):
            text = str(report.longrepr[2])
        message = reason = text.removeprefix("Skipped: ")
    else:
        status = Status.ERROR
        # xdist itself makes the report of an item whose worker died; its ``when`` is no phase.
        prefix = "" if report.when in {"call", "setup", "teardown"} else "no report: "
        # The exception comes first, because matrices and summaries show the first line only.
        lines = [*error_lines(report)[:1], prefix + report.longreprtext]
        message = "\n".join(lines).strip()
        reason = ""
    return Verdict(
        item.check,
        item.cell,
        status,
        message,
        reason,
        # The driver is filled in at the end of the session, from the suite's other items.
        suite=item.suite.rpartition("::")[2],
        nodeid=nodeid,
        seconds=report.duration,
    )


def error_lines(report: pytest.TestReport) -> list[str]:
    """Return the lines of a report's exception, which pytest marks with an E, without the E."""
    lines = []
    for line in report.longreprtext.splitlines():
        if line.startswith("E "):
            lines.append(line.removeprefix("E ").strip())
    return lines
