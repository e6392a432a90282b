"""A plugin for a pytest that a test starts: it records how tests end and which processes they leave running.

It writes each record at once, since that pytest may be killed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


def note(**record: Any) -> None:
    """Append a record, if the environment names a file: the command that repeats a test has this plugin too."""
    with Path(os.environ.get("RECORDED_REPORTS", os.devnull)).open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def below() -> Iterator[tuple[int, str]]:
    """Yield (process id, command line) of the processes that this one and its children started."""
    import psutil  # only if it is needed: tests look at what a pytest imports

    for process in psutil.Process().children(recursive=True):
        try:
            if process.status() != psutil.STATUS_ZOMBIE:
                yield process.pid, " ".join(process.cmdline())[:200]
        except psutil.NoSuchProcess:
            pass


class OfReports:
    """Record reports, in the only process or in xdist's controller."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        note(
            nodeid=report.nodeid,
            when=report.when,
            duration=report.duration,
            outcome=report.outcome,
            text=report.longreprtext,
            sections=report.sections,
            properties=report.user_properties,
            xfail=getattr(report, "wasxfail", None),
            subtest=type(report).__name__ == "SubtestReport",
        )


class OfProcesses:
    """Record, in the process that runs the tests, which processes each test leaves behind."""

    def __init__(self) -> None:
        self.before: dict[int, str] = {}

    def pytest_runtest_logstart(self) -> None:
        self.before = dict(below())

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        if "RANK" in os.environ:
            return  # a rank of a worker
        new = [f"{pid} {line}" for pid, line in below() if pid not in self.before]
        note(nodeid=nodeid, left=new, process=os.getpid())


def pytest_configure(config: pytest.Config) -> None:
    if not config.pluginmanager.has_plugin("terminal") and not hasattr(config, "workerinput"):
        return  # a rank
    is_worker = hasattr(config, "workerinput")
    has_workers = getattr(config.option, "dist", "no") != "no"
    if not is_worker:
        config.pluginmanager.register(OfReports())
    runs_tests = is_worker or not has_workers
    if runs_tests and "RECORDED_PROCESSES" in os.environ:
        config.pluginmanager.register(OfProcesses())
