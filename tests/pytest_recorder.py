"""A plugin for a pytest of its own: writes at once, for that process may be killed, how tests end and what they leave running."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


def note(**found: Any) -> None:
    # The command that runs a test again has this plugin too, and nobody reads what it finds there.
    with Path(os.environ.get("RECORDED_REPORTS", os.devnull)).open("a", encoding="utf-8") as file:
        file.write(json.dumps(found) + "\n")


def below() -> Iterator[tuple[int, str]]:
    """The processes that this one and its children started."""
    import psutil  # not where nobody asks: it is seen there who imports what

    for process in psutil.Process().children(recursive=True):
        try:
            if process.status() != psutil.STATUS_ZOMBIE:
                yield process.pid, " ".join(process.cmdline())[:200]
        except psutil.NoSuchProcess:
            pass


class OfReports:
    """Where the reports come together: the only process, or the one that has the workers of xdist."""

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
    """Where the tests run: after each one, the processes that were not there before it."""

    def __init__(self) -> None:
        self.before: dict[int, str] = {}

    def pytest_runtest_logstart(self) -> None:
        self.before = dict(below())

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        if "RANK" in os.environ:
            return  # a rank of a worker
        left = [f"{pid} {line}" for pid, line in below() if pid not in self.before]
        note(nodeid=nodeid, left=left, process=os.getpid())


def pytest_configure(config: pytest.Config) -> None:
    if not config.pluginmanager.has_plugin("terminal") and not hasattr(config, "workerinput"):
        return  # a rank
    worker, controller = hasattr(config, "workerinput"), getattr(config.option, "dist", "no") != "no"
    if not worker:
        config.pluginmanager.register(OfReports())
    if "RECORDED_PROCESSES" in os.environ and (worker or not controller):
        config.pluginmanager.register(OfProcesses())
