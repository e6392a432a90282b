"""Results of all workers: gathered for the matrix in the terminal, the report files, and properties in JUnit."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path
from typing import Any

import pytest

from pytest_distcompat import clock
from pytest_distcompat.cell import Cell
from pytest_distcompat.decode import decode
from pytest_distcompat.grouping import grouped
from pytest_distcompat.installed import GET_TORCH, versions
from pytest_distcompat.plugin.declared import declared_of
from pytest_distcompat.plugin.options import options_of
from pytest_distcompat.plugin.packing import keep_durations
from pytest_distcompat.plugin.reporting.progress import Forecast, Progress
from pytest_distcompat.plugin.reporting.summary import fold_failures, show
from pytest_distcompat.plugin.selection import is_narrowed, strip_group
from pytest_distcompat.plugin.session import LEFT_OUT, DistcompatSession
from pytest_distcompat.plugin.shard import FILE as SHARDS
from pytest_distcompat.report.causes import rank_of_cause
from pytest_distcompat.report.compare import compare
from pytest_distcompat.report.document import Report, facets
from pytest_distcompat.report.result import Row
from pytest_distcompat.report.telemetry import send, with_device_seconds
from pytest_distcompat.report.write import append_summary, write_report
from pytest_distcompat.status import Status, Verdict

#: The attribute of a report that carries a verdict from an xdist worker to the controller.
ATTRIBUTE = "distcompat"
#: The variable with the file for the summary of a GitHub step
#: (https://docs.github.com/en/actions/reference/workflows-and-actions/workflow-commands#adding-a-job-summary).
SUMMARY = "GITHUB_STEP_SUMMARY"

#: Exit codes of a session in which nothing failed.
_GOOD = frozenset({pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED})

#: The package that a reason for skipping a cell names as missing.
_NOT_INSTALLED = re.compile(r"\b([\w.-]+) is not installed")
#: How the node id of a suite ends that has no selected cell.
_NO_CELL = "::test[no-cell]"
#: The node id of a suite's item: the node id of the suite, the cell, the check.
_ITEM = re.compile(r"(?P<place>.+)::test\[(?P<cell>[\w-]+):(?P<check>\w+)\]")


class Results:
    """Hooks that gather results, registered in the process that has the terminal."""

    def __init__(self, session: DistcompatSession) -> None:
        self.session = session
        self.results: dict[str, Verdict] = {}
        self.cells: dict[str, Row] = {}
        #: The node ids of the suites' items, in the order in which they were collected.
        self.collected: dict[str, None] = {}
        #: The items of suites without a selected cell: node id to the reason.
        self.without_cells: dict[str, str] = {}
        #: Why nothing ran, as lines, if that fails the session.
        self._nothing_ran: list[str] = []
        #: Which suites' cells the profile leaves out, as lines.
        self._left_out: list[str] = []
        self.report: Report | None = None
        self._began = clock.wall() - (clock.now() - session.began)
        self._ending = ""
        self._running = False
        #: The number of failures that pytest counts which are red verdicts of suites.
        self._own_failures = 0
        self._versions = versions()
        self._written: list[str] = []
        #: The number of this shard, the division, and in which shards a cell can run; None without shards.
        self._shard: dict[str, Any] | None = None
        self._progress: Progress | None = None

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Note the items of suites in a session without xdist."""
        self._note_collected(item.nodeid for item in session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        """Note the items of suites that an xdist worker has collected; all workers collect the same."""
        self._note_collected(ids)
        self._start_progress()

    def _note_collected(self, nodeids: Any) -> None:
        stripped = [strip_group(self.session.config, nodeid) for nodeid in nodeids]
        self.collected.update((nodeid, None) for nodeid in stripped if _parse_suite_item(nodeid))
        self.without_cells.update((nodeid, "") for nodeid in stripped if nodeid.endswith(_NO_CELL))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> None:
        """Note that tests will run, and show progress from now on."""
        option = session.config.option
        if not option.collectonly:
            self._running = not getattr(option, "setuponly", False)
            self._start_progress()

    def _start_progress(self) -> None:
        if self.collected and self._progress is None:
            config = self.session.config
            forecast = Forecast(self.session.last_report, self.collected)
            self._progress = Progress(
                config,
                self.session.runs,
                lambda: (len(self.results), len(self.collected)),
                lambda passed: forecast.left(tuple(self.results), passed),
                self.session.waits,
            )
            config.pluginmanager.register(self._progress, "distcompat-progress")
            config.add_cleanup(self._progress.stop)
            self._progress.start()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record the verdict that a report carries, and add properties to the report for JUnit and report logs."""
        data = getattr(report, ATTRIBUTE, None)
        nodeid = strip_group(self.session.config, report.nodeid)
        if data is not None:
            self._record_verdict(data, report)
        elif _parse_suite_item(nodeid) and (report.failed or report.skipped):
            self._record_without_verdict(nodeid, report)
        elif nodeid in self.without_cells and isinstance(report.longrepr, tuple):
            self.without_cells[nodeid] = str(report.longrepr[2]).removeprefix("Skipped: ")
        result = self.results.get(nodeid)
        self._own_failures += report.failed and result is not None and result.red
        report.user_properties.extend(self._properties(nodeid, report))

    def _record_verdict(self, data: dict[str, Any], report: pytest.TestReport) -> None:
        result = decode(Verdict, data["verdict"])
        rank = rank_of_cause(result.message) if result.rank is None else result.rank
        # The item as a whole: under xdist a report comes when its worker has sent it.
        began = report.start - self._began
        result = dataclasses.replace(result, rank=rank, seconds=report.duration, began=began)
        self.results[result.nodeid] = result
        row = self._row(result)
        row.not_applicable.update(data["not_applicable"])
        row.cost.update(data["cost"])

    def _record_without_verdict(self, nodeid: str, report: pytest.TestReport) -> None:
        """Record an item that failed or was skipped outside its check: in a fixture, or because its worker died."""
        suite_id, cell, check = _parse_suite_item(nodeid)
        recorded = self.results.get(nodeid)
        text = report.longreprtext
        lines = [line.removeprefix("E ").strip() for line in text.splitlines() if line.startswith("E ")]
        if recorded is not None and (recorded.red or report.skipped):
            if report.failed and report.when == "teardown":
                self.results[nodeid] = dataclasses.replace(recorded, teardown=(lines or [text.strip()])[0])
            return
        if report.skipped:
            skip_text = str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else text
            status, message = Status.SKIPPED, skip_text.removeprefix("Skipped: ")
        else:
            prefix = "" if report.when in {"call", "setup", "teardown"} else "no report: "
            status, message = Status.ERROR, "\n".join([*lines[:1], prefix + text]).strip()
        reason = message if report.skipped else ""
        # The driver is filled in at the end, from the suite's other items.
        item: dict[str, Any] = {"suite": suite_id.rpartition("::")[2], "nodeid": nodeid, "seconds": report.duration}
        self.results[nodeid] = Verdict(check, cell, status, message, reason, **item)
        self._row(self.results[nodeid])

    def _row(self, result: Verdict) -> Row:
        return self.cells.setdefault(f"{result.place}:{result.cell}", Row.of(result))

    def _properties(self, nodeid: str, report: pytest.TestReport) -> list[tuple[str, object]]:
        """Return the properties of a distributed test: cell, driver, check, status, rank of the cause, versions."""
        result = self.results.get(nodeid)
        values: dict[str, object] = {}
        if result is not None:
            values = {name: getattr(result, name) for name in ("cell", "driver", "check")}
            values |= {"status": result.status.value, "rank": result.rank}
        elif "distcompat" in report.keywords and not _parse_suite_item(nodeid):
            # A marked test: its cell, where it has one, is in its id.
            parts = nodeid.rpartition("[")[2].rstrip("]")
            values = {"cell": parts if facets(parts) else None}
        if values:
            values["versions"] = ", ".join(f"{name} {version}" for name, version in self._versions.items())
        return [(f"distcompat_{name}", value) for name, value in values.items() if value is not None]

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Note what ended the session early: Ctrl-C, pytest.exit(), or under xdist ``-x`` or ``--stepwise``."""
        self._ending = "interrupted" if excinfo.type in {KeyboardInterrupt, pytest.exit.Exception} else "stopped"

    # tryfirst: pytest's own hook removes its temporary directories, and with them the store.
    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Write the report files, and durations. Not in the terminal summary: a session that was interrupted may have none."""
        if self._progress is not None:
            self._progress.stop()
        keep_durations(self.session, exitstatus)
        self._shard = self.session.shared(SHARDS)
        # Read here: pytest removes the store before the summary.
        self._left_out = self.session.shared(LEFT_OUT) or []
        empty = self._shard is not None and not self._shard["plan"][self._shard["number"] - 1]
        if empty and any(self._shard["plan"]) and session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
            session.exitstatus = pytest.ExitCode.OK
        suites = self.results or self.collected or self.without_cells
        # A report or a baseline needs suites, unless a selection explains that none was collected.
        needed = self.session.setting("report").value or self.session.setting("baseline").value
        if not self._running or not (suites or (needed and (self._shard or not is_narrowed(session.config)))):
            return
        self.report = self._report(exitstatus)
        fold_failures(session.config, self.report.results)
        self._compare(session)
        self._require_a_verdict(session)
        paths = self.session.setting("report").value
        summary = os.environ.get(SUMMARY)
        jobs: list[tuple[Path, Any]] = [(path, write_report) for path in paths]
        jobs += [(Path(summary), append_summary)] if summary else []
        for path, write in jobs:
            try:
                write(path, self.report)
            except OSError as error:
                self._written.append(f"report: {path} could not be written: {error.strerror}")
                # The user requested this file, but not the summary of a GitHub step.
                if write is write_report and session.exitstatus in _GOOD:
                    session.exitstatus = pytest.ExitCode.TESTS_FAILED
            else:
                self._written += [f"report: {path}"] if write is write_report else []
        self._written += filter(None, [send(self.report)])

    def _report(self, exitstatus: int) -> Report:
        from pytest_distcompat.evidence.store import add_evidence, read_store

        runs = read_store(self.session.runs)
        unreached = [nodeid for nodeid in self.collected if nodeid not in self.results]
        internal = "internal error" if exitstatus == pytest.ExitCode.INTERNAL_ERROR else ""
        ending = self._ending or internal or ("stopped" if unreached else "finished")
        session_info = {**self._session_info(), "ending": ending, "runs": sum(bool(run.done) for run in runs)}
        if self._shard:
            session_info["shard"] = {"number": self._shard["number"], "plan": self._shard["plan"]}
        session_info["remove"] = declared_of(self.session).stale()
        ordered = self.ordered()
        rows = [self.cells[key] for key in dict.fromkeys(f"{result.place}:{result.cell}" for result in ordered)]
        results = with_device_seconds(ordered, session_info["timeline"])
        report = Report(session_info, results, rows, unreached=unreached)
        report.fill_drivers()
        # Only files show what was trained, and to read all trainings again takes seconds.
        add_evidence(report, runs, trainings=bool(self.session.setting("report").value or os.environ.get(SUMMARY)))
        return report

    def _compare(self, session: pytest.Session) -> None:
        """Compare with the baseline, if there is one: only what is newly broken or missing fails the session.

        Items that -k, a node id or another shard leaves out are not missing.
        """
        before = self.session.setting("baseline").value
        if before is None or self.report is None:
            return
        found = compare(before, self.report)
        if self._shard or is_narrowed(session.config):
            found.missing = [change for change in found.missing if change.after or change.why == "not reached"]
        regressed = bool(found.broken or found.missing)
        # pytest counts more than tests: modules that cannot be imported, and failures of other plugins (pytest-cov).
        only_verdicts = 0 < session.testsfailed == self._own_failures
        session_info = self.report.session
        session_info["baseline"] = found.to_json(self.session.setting("baseline").text)
        if regressed and session.exitstatus in _GOOD:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        elif session.exitstatus == pytest.ExitCode.TESTS_FAILED and only_verdicts and not regressed:
            session.exitstatus = pytest.ExitCode.OK
            session_info["baseline"]["text"].append("nothing is newly broken or newly missing: exit code 0")

    def _require_a_verdict(self, session: pytest.Session) -> None:
        """Fail a session whose suites came to no verdict: nothing was checked, which is no success."""
        ran = any(result.status != "skipped" for result in self.results.values())
        allowed = self.session.setting("nothing_ran").value == "pass" or session.exitstatus not in _GOOD
        if ran or allowed or not (self.collected or self.without_cells):
            return
        if self._shard and any(self._shard["can_run"]) and not self._shard["can_run"][self._shard["number"] - 1]:
            # The cells that can run are all in other shards.
            return
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        named = [(one.reason or one.message, f"{one.suite} {one.cell}") for one in self.ordered()]
        named += [(reason, nodeid.split("::")[-2]) for nodeid, reason in self.without_cells.items()]
        cells = grouped(named)
        self._nothing_ran = ["no cell ran, so nothing was checked; expected at least one verdict"]
        self._nothing_ran += [f"  {', '.join(dict.fromkeys(names))}: {reason}" for reason, names in cells.items()]
        missing = dict.fromkeys(package for reason in cells for package in _NOT_INSTALLED.findall(reason))
        if "torch" in missing:
            # The others need it, and would bring it for CUDA.
            self._nothing_ran.append(f"  install it: {GET_TORCH}")
        elif missing:
            self._nothing_ran.append(f"  install it: pip install {' '.join(missing)}")
        self._nothing_ran.append("  --distcompat-nothing-ran=pass lets such a session pass")

    def ordered(self) -> list[Verdict]:
        """Return the results in the order of the matrix, independent of the order in which items ran."""
        from pytest_distcompat.checks import all_check_names
        from pytest_distcompat.precisions import PRECISIONS
        from pytest_distcompat.strategies import STRATEGIES

        strategies, precisions, checks = STRATEGIES.names(), PRECISIONS.names(), all_check_names()

        def matrix_order(result: Verdict) -> tuple[object, ...]:
            cell = Cell.parse(result.cell)
            axes = (strategies.index(cell.strategy), precisions.index(cell.precision), cell.world_size, cell.nodes)
            return (result.suite, len(cell.options), str(cell.options), *axes, checks.index(result.check))

        return sorted(self.results.values(), key=matrix_order)

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print the matrix and the paths of the report files."""
        if self.report is not None:
            show(terminalreporter, self.report, [*self._left_out, *self._written], self._nothing_ran)

    def _session_info(self) -> dict[str, Any]:
        from pytest_distcompat.launch import nccl
        from pytest_distcompat.lease import entries, gaps, read_timeline

        session = self.session
        names = [name.removeprefix("distcompat_") for name in options_of(session.config)]
        settings = {name: {"value": session.setting(name).text, "from": session.setting(name).origin} for name in names}
        # What "auto" was on this machine: whether ranks shared a GPU.
        settings["ranks_per_gpu"]["value"] = str(session.ranks_each)
        library = nccl.library() if session.gpus else None
        of_nccl = {} if library is None else {"nccl": ".".join(map(str, library.version))}
        timeline = entries(session.store_path, session.began)
        # A lease of a run names its directory, whose name is the run's id.
        for entry in timeline:
            entry["who"] = strip_group(session.config, entry["who"].removeprefix(f"{session.runs}{os.sep}"))
        return {
            "versions": {**self._versions, **of_nccl},
            "device": session.device,
            "gpu": session.gpu_name,
            "world_size": session.world_size,
            "began": clock.utc(self._began),
            "seconds": round(clock.now() - session.began, 1),
            "settings": settings,
            "timeline": timeline,
            "gaps": gaps(read_timeline(session.store_path), session.began, clock.now()),
        }


def _parse_suite_item(nodeid: str) -> tuple[str, ...]:
    """Return the node id of the suite, the cell and the check of a suite's item; empty for any other test."""
    match = _ITEM.fullmatch(nodeid)
    if match is None or not facets(match["cell"]):
        return ()
    from pytest_distcompat.checks import all_check_names

    return match.groups() if match["check"] in all_check_names() else ()
