"""Gathers the verdicts of all workers: the matrix in the terminal, the report files, the properties of each item's report."""

from __future__ import annotations

import dataclasses
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

from pytest_distcompat import clock
from pytest_distcompat.cell import Cell
from pytest_distcompat.plugin.declared import declared_of
from pytest_distcompat.plugin.nodeids import strip_group
from pytest_distcompat.plugin.options import OPTIONS
from pytest_distcompat.plugin.reporting.progress import Progress
from pytest_distcompat.plugin.reporting.summary import Summary
from pytest_distcompat.plugin.selection import narrowed
from pytest_distcompat.plugin.session import DistcompatSession
from pytest_distcompat.report import (
    Report,
    Result,
    Row,
    append_summary,
    compare,
    facets,
    rank_of_cause,
    versions,
    write_report,
)

#: The attribute of a report that carries a verdict from an xdist worker to the controller.
ATTRIBUTE = "distcompat"
#: Where GitHub wants a step's summary
#: (https://docs.github.com/en/actions/reference/workflows-and-actions/workflow-commands#adding-a-job-summary).
SUMMARY = "GITHUB_STEP_SUMMARY"

#: Exit codes of a run in which nothing failed.
_GOOD = frozenset({pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED})

#: The node id of a suite's item: the place of the suite, the cell, the check.
_ITEM = re.compile(r"(?P<place>.+)::test\[(?P<cell>[\w-]+):(?P<check>\w+)\]")


class Results:
    """Registered in the process that talks to the user."""

    def __init__(self, session: DistcompatSession) -> None:
        self.session = session
        self.found: dict[str, Result] = {}
        self.cells: dict[str, Row] = {}
        #: The node ids of the suites' items, in the order in which they were collected.
        self.asked: dict[str, None] = {}
        self.report: Report | None = None
        self._began = clock.wall()
        self._ending = ""
        self._running = False
        #: How many of the failures that pytest counts are red verdicts of ours.
        self._own_failures = 0
        self._versions = versions()
        self._written: list[str] = []
        self._progress: Progress | None = None

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Without xdist: what will be run, if nothing interrupts it."""
        self._ask(item.nodeid for item in session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        """With xdist, from each worker the same."""
        self._ask(ids)
        self._watch()

    def _ask(self, nodeids: Any) -> None:
        found = (strip_group(self.session.config, nodeid) for nodeid in nodeids)
        self.asked.update((nodeid, None) for nodeid in found if _item(nodeid))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> None:
        """From here on runs run."""
        option = session.config.option
        if not option.collectonly:
            self._running = not getattr(option, "setuponly", False)
            self._watch()

    def _watch(self) -> None:
        if self.asked and self._progress is None:
            config = self.session.config
            self._progress = Progress(config, self.session.runs)
            config.pluginmanager.register(self._progress, "distcompat-progress")
            config.add_cleanup(self._progress.stop)
            self._progress.start()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the verdict that a report carries, and put into the report what JUnit and report logs are to have of it."""
        data = getattr(report, ATTRIBUTE, None)
        nodeid = strip_group(self.session.config, report.nodeid)
        if data is not None:
            self._keep(data, report)
        elif _item(nodeid) and (report.failed or report.skipped):
            self._keep_without_verdict(nodeid, report)
        found = self.found.get(nodeid)
        self._own_failures += report.failed and found is not None and found.red
        report.user_properties.extend(self._properties(nodeid, report))

    def _keep(self, data: dict[str, Any], report: pytest.TestReport) -> None:
        more = {name: data[name] for name in ("not_applicable", "cost")}
        own = {name: value for name, value in data.items() if name not in more}
        if own["rank"] is None:
            own["rank"] = rank_of_cause(data["message"])
        result = self.found[data["nodeid"]] = Result(**own, seconds=report.duration)
        row = self._row(result)
        row.not_applicable.update(more["not_applicable"])
        row.cost.update(more["cost"])

    def _keep_without_verdict(self, nodeid: str, report: pytest.TestReport) -> None:
        """An item that failed or was skipped outside its check (a fixture, a worker that died), or in its teardown."""
        place, cell, check = _item(nodeid)
        known = self.found.get(nodeid)
        text = report.longreprtext
        lines = [line.removeprefix("E ").strip() for line in text.splitlines() if line.startswith("E ")]
        if known is not None and (known.red or report.skipped):
            if report.failed and report.when == "teardown":
                self.found[nodeid] = dataclasses.replace(known, teardown=(lines or [text.strip()])[0])
            return
        if report.skipped:
            why = str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else text
            status, message = "skipped", why.removeprefix("Skipped: ")
        else:
            where = "" if report.when in {"call", "setup", "teardown"} else "no report: "
            status, message = "error", "\n".join([*lines[:1], where + text]).strip()
        reason = message if report.skipped else ""
        suite = place.rpartition("::")[2]
        # Which driver the suite has, its other items tell.
        result = Result(suite, "", cell, check, status, message, reason, nodeid, report.duration)
        self.found[nodeid] = result
        self._row(result)

    def _row(self, result: Result) -> Row:
        made = Row(result.suite, result.driver, result.cell, result.place)
        return self.cells.setdefault(f"{result.place}:{result.cell}", made)

    def _properties(self, nodeid: str, report: pytest.TestReport) -> list[tuple[str, object]]:
        """Cell, driver, check, status, rank of the cause, versions; for an item of a suite, and for a marked one."""
        result = self.found.get(nodeid)
        told: dict[str, object] = {}
        if result is not None:
            told = {"cell": result.cell, "driver": result.driver, "check": result.check, "status": result.status}
            told["rank"] = result.rank
        elif "distcompat" in report.keywords and not _item(nodeid):
            # A marked test: its cell, where it has one, is in its id.
            parts = nodeid.rpartition("[")[2].rstrip("]")
            told = {"cell": parts if facets(parts) else None}
        if told:
            told["versions"] = ", ".join(f"{name} {version}" for name, version in self._versions.items())
        return [(f"distcompat_{name}", value) for name, value in told.items() if value is not None]

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Ctrl-C, or pytest.exit(). Under xdist ``-x`` comes here too, and ``--stepwise``: each with a class of its own."""
        self._ending = "interrupted" if excinfo.type in {KeyboardInterrupt, pytest.exit.Exception} else "stopped"

    # First: pytest removes its temporary directories at the end, and the store with them.
    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Write the reports: here, since a session that was broken off may have no terminal summary."""
        if self._progress is not None:
            self._progress.stop()
        if not self._running or not (self.found or self.asked or self._missed(session.config)):
            return
        self.report = self._report(exitstatus)
        self._compare(session)
        paths = self.session.setting("report").value
        summary = os.environ.get(SUMMARY)
        jobs: list[tuple[Path, Any]] = [(path, write_report) for path in paths]
        jobs += [(Path(summary), append_summary)] if summary else []
        for path, write in jobs:
            try:
                write(path, self.report)
            except OSError as error:
                self._written.append(f"report: {path} could not be written: {error.strerror}")
                # Somebody waits for that file; a step's summary nobody asked for.
                if write is write_report and session.exitstatus in _GOOD:
                    session.exitstatus = pytest.ExitCode.TESTS_FAILED
            else:
                self._written += [f"report: {path}"] if write is write_report else []

    def _missed(self, config: pytest.Config) -> bool:
        """Whether somebody waits for verdicts, and no suite was collected though the run was for all that there are."""
        wanted = self.session.setting("report").value or self.session.setting("baseline").value
        return bool(wanted) and not narrowed(config)

    def _report(self, exitstatus: int) -> Report:
        from pytest_distcompat.evidence import add_evidence, read_store

        runs = read_store(self.session.runs)
        unreached = [nodeid for nodeid in self.asked if nodeid not in self.found]
        internal = "internal error" if exitstatus == pytest.ExitCode.INTERNAL_ERROR else ""
        ending = self._ending or internal or ("stopped" if unreached else "finished")
        session_info = {**self._session_info(), "ending": ending, "runs": sum(run.done for run in runs)}
        session_info["remove"] = declared_of(self.session).stale()
        drivers = {row.place: row.driver for row in self.cells.values() if row.driver}
        for row in self.cells.values():
            row.driver = drivers.get(row.place, "")
        results = [dataclasses.replace(result, driver=drivers.get(result.place, "")) for result in self.ordered()]
        rows = [self.cells[key] for key in dict.fromkeys(f"{result.place}:{result.cell}" for result in results)]
        report = Report(session_info, results, rows, unreached=unreached)
        add_evidence(report, runs)
        return report

    def _compare(self, session: pytest.Session) -> None:
        """With a baseline only news makes the run fail; what a -k or a node id left out is no news."""
        before = self.session.setting("baseline").value
        if before is None or self.report is None:
            return
        found = compare(before, self.report)
        if narrowed(session.config):
            found.missing = [change for change in found.missing if change.after or change.why == "not reached"]
        news = bool(found.broken or found.missing)
        # pytest counts more than tests: modules that cannot be imported, and what other plugins ask for (pytest-cov).
        ours = 0 < session.testsfailed == self._own_failures
        session_info = self.report.session
        session_info["baseline"] = found.to_json(self.session.setting("baseline").text)
        if news and session.exitstatus in _GOOD:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        elif session.exitstatus == pytest.ExitCode.TESTS_FAILED and ours and not news:
            session.exitstatus = pytest.ExitCode.OK
            session_info["baseline"]["text"].append("nothing is newly broken or newly missing: exit code 0")

    def ordered(self) -> list[Result]:
        """In the order of the matrix, whichever worker was first and however the tests were shuffled."""
        from pytest_distcompat.checks import CHECKS
        from pytest_distcompat.precisions import PRECISIONS
        from pytest_distcompat.strategies import STRATEGIES

        strategies, precisions, checks = STRATEGIES.names(), PRECISIONS.names(), CHECKS.names()

        def place(result: Result) -> tuple[object, ...]:
            cell = Cell.parse(result.cell)
            axes = (strategies.index(cell.strategy), precisions.index(cell.precision), cell.world_size)
            return (result.suite, len(cell.options), str(cell.options), *axes, checks.index(result.check))

        return sorted(self.found.values(), key=place)

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """The matrix; and where the report went."""
        if self.report is not None:
            Summary(terminalreporter).show(self.report, self._written)

    def _session_info(self) -> dict[str, Any]:
        from pytest_distcompat.lease import entries

        session = self.session
        names = [name.removeprefix("distcompat_") for name in OPTIONS]
        settings = {name: {"value": session.setting(name).text, "from": session.setting(name).origin} for name in names}
        # a run is told by its directory: its name is the run's id.
        runs = str(session.runs)
        timeline = [
            {**entry, "who": entry["who"].rpartition(os.sep)[2] if runs in entry["who"] else entry["who"]}
            for entry in entries(session.store_path, session.began)
        ]
        return {
            "versions": self._versions,
            "device": session.device,
            "gpu": session.gpu_name,
            "world_size": session.world_size,
            "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._began)),
            "seconds": round(clock.now() - session.began, 1),
            "settings": settings,
            "timeline": timeline,
        }


def _item(nodeid: str) -> tuple[str, ...]:
    """Place of the suite, cell and check of a suite's item; nothing for any other test."""
    found = _ITEM.fullmatch(nodeid)
    if found is None or not facets(found["cell"]):
        return ()
    from pytest_distcompat.checks import CHECKS

    return found.groups() if found["check"] in CHECKS.by_name else ()
