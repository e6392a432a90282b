"""Results of all workers, gathered in the process that has the terminal, and reported at the end.

``plugin.current.session_of`` registers ``Results`` as a pytest plugin, in pytest's process or in
xdist's controller. From then on pytest calls its hooks:

1. After collection it notes which items the suites have. A suite is a subclass of ``CompatSuite``
   with an item for each *check* in each *cell*: ``TestMyTrainer::test[fsdp2-fp32-w2:names]`` is the
   check ``names`` in the cell ``fsdp2-fp32-w2`` (strategy, precision, 2 ranks).
2. While tests run, it takes the *verdict* of each item from its report. That is passed, failed,
   crashed and so on (``status.Verdict``). ``suite.run`` has put it there, on an xdist worker
   mostly.
3. At the end it makes a ``Report`` of all verdicts, compares it with the *baseline* (the report of
   an earlier session), decides whether the session fails, and writes the report files.
4. In pytest's terminal summary it prints the matrix of verdicts.

*Red* are the verdicts that make a session fail. The *store* is a directory that all processes of
the session share: ``session.shared(FILE)`` returns what any of them has written to a file there. A
*shard* is the part of the tests that one of several machines runs (``--distcompat-shard 2/3``). Its
*plan* is the division: a list of the cells and modules of each shard.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from pytest_distcompat import clock
from pytest_distcompat.cell import Cell
from pytest_distcompat.decode import decode
from pytest_distcompat.installed import versions
from pytest_distcompat.plugin.declared import declared_of
from pytest_distcompat.plugin.packing import keep_durations
from pytest_distcompat.plugin.reporting.nothing_ran import nothing_ran_lines
from pytest_distcompat.plugin.reporting.progress import Forecast, Progress
from pytest_distcompat.plugin.reporting.session_info import session_info
from pytest_distcompat.plugin.reporting.suite_items import (
    NO_CELL,
    error_lines,
    parse_suite_item,
    verdict_without_check,
)
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
from pytest_distcompat.status import Verdict

#: The attribute of pytest's report of an item with what ``suite.run`` says of it; xdist sends it to
#: the controller. It is a dictionary: ``verdict`` (a ``Verdict`` as plain data), ``not_applicable``
#: (the name of each check without an item in this cell to the reason) and ``cost`` (the fields of
#: ``cost.Cost``; empty if nothing was measured).
ATTRIBUTE = "distcompat"
#: The variable with the file for the summary of a GitHub step. See
#: https://docs.github.com/en/actions/reference/workflows-and-actions/workflow-commands#adding-a-job-summary
SUMMARY = "GITHUB_STEP_SUMMARY"

#: Exit codes of a session in which nothing failed.
_GOOD = frozenset({pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED})


class Results:
    """Hooks that gather results, registered in the process that has the terminal."""

    def __init__(self, session: DistcompatSession) -> None:
        self.session = session
        #: Node id of an item to its verdict.
        self.results: dict[str, Verdict] = {}
        #: Suite and cell (see ``_key``) to what is known about the cell besides its verdicts.
        self.cells: dict[str, Row] = {}
        #: The node ids of the suites' items, in the order in which they were collected. A
        #: dictionary, because it keeps the order and has each once.
        self.collected: dict[str, None] = {}
        #: The items of suites without a selected cell: node id to the reason.
        self.without_cells: dict[str, str] = {}
        #: Why nothing ran, as lines, if that fails the session.
        self._nothing_ran: list[str] = []
        #: A line for each suite some of whose cells the profile leaves out.
        self._left_out: list[str] = []
        #: The report of the session; None until it ends, or without suites.
        self.report: Report | None = None
        #: When the session began, in seconds since 1970. It is computed, because the session notes
        #: a time of CLOCK_MONOTONIC.
        self._began = clock.wall() - (clock.now() - session.began)
        #: ``interrupted`` or ``stopped`` if pytest said so, see ``pytest_keyboard_interrupt``.
        self._ending = ""
        #: Whether tests run at all, not with ``--collect-only`` or ``--setup-only``.
        self._running = False
        #: How many of the failures that pytest counts are red verdicts of suites.
        self._own_failures = 0
        #: Package to installed version.
        self._versions = versions()
        #: Lines about the report files, as ``report: results.html``.
        self._written: list[str] = []
        #: None without shards (``--distcompat-shard 2/3``: this machine runs part 2 of 3). Else
        #: ``number`` (2), ``plan`` (the cells and modules of each of the 3 parts) and ``can_run``
        #: (whether this machine could run any cell of each part).
        self._shard: dict[str, Any] | None = None
        #: The progress line; None until tests run.
        self._progress: Progress | None = None

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Note the items of suites in a session without xdist."""
        self._note_collected(item.nodeid for item in session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        """Note the items of suites that an xdist worker has collected.

        All workers collect the same.
        """
        self._note_collected(ids)
        self._start_progress()

    def _note_collected(self, nodeids: Iterable[str]) -> None:
        """Note which of these tests are items of suites."""
        for nodeid in nodeids:
            # xdist may have appended ``@group``.
            stripped = strip_group(self.session.config, nodeid)
            if parse_suite_item(stripped) is not None:
                self.collected[stripped] = None
            if stripped.endswith(NO_CELL):
                self.without_cells[stripped] = ""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> None:
        """Note that tests will run, and show progress from now on."""
        option = session.config.option
        if not option.collectonly:
            self._running = not getattr(option, "setuponly", False)
            self._start_progress()

    def _start_progress(self) -> None:
        """Start the progress line, once the items of suites are known.

        Without xdist that is when tests begin to run, else when the first worker has collected.
        """
        if not self.collected or self._progress is not None:
            return
        config = self.session.config
        # From how long the items took in an earlier session.
        forecast = Forecast(self.session.last_report, self.collected)
        self._progress = Progress(
            config,
            self.session.runs,
            counts=lambda: (len(self.results), len(self.collected)),
            left=lambda passed: forecast.left(tuple(self.results), passed),
            waits=self.session.waits,
        )
        config.pluginmanager.register(self._progress, "distcompat-progress")
        config.add_cleanup(self._progress.stop)
        self._progress.start()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record the verdict that a report carries.

        Add properties to the report for JUnit and report logs.
        """
        # Only the report of a suite's call has it: setup and teardown come to no verdict.
        data = getattr(report, ATTRIBUTE, None)
        nodeid = strip_group(self.session.config, report.nodeid)
        if data is not None:
            self._record_verdict(data, report)
        elif parse_suite_item(nodeid) is not None:
            if report.failed or report.skipped:
                self._record_without_verdict(nodeid, report)
        elif nodeid in self.without_cells and isinstance(report.longrepr, tuple):
            # The item of a suite without cells was skipped: pytest has (path, line, reason).
            self.without_cells[nodeid] = str(report.longrepr[2]).removeprefix("Skipped: ")
        result = self.results.get(nodeid)
        if report.failed and result is not None and result.red:
            self._own_failures += 1
        report.user_properties.extend(self._properties(nodeid, report))

    def _record_verdict(self, data: dict[str, Any], report: pytest.TestReport) -> None:
        """Record a verdict, with its times, and what else is known about its cell.

        Args:
            data: The attribute of the report, see ``ATTRIBUTE``.
            report: pytest's report of the item's call.
        """
        verdict = decode(Verdict, data["verdict"])
        rank = verdict.rank
        if rank is None:
            # No rank failed. But a finding may name one, as ``rank 1 has other parameters``.
            rank = rank_of_cause(verdict.message)
        verdict = dataclasses.replace(
            verdict,
            rank=rank,
            seconds=report.duration,
            # The item as a whole: under xdist a report comes when its worker has sent it.
            began=report.start - self._began,
        )
        self.results[verdict.nodeid] = verdict
        row = self._row(verdict)
        row.not_applicable.update(data["not_applicable"])
        row.cost.update(data["cost"])

    def _record_without_verdict(self, nodeid: str, report: pytest.TestReport) -> None:
        """Record an item that failed or was skipped outside its check.

        That is in a fixture, or because its worker died.
        """
        recorded = self.results.get(nodeid)
        if recorded is None or not (recorded.red or report.skipped):
            # A failed teardown, or a worker that died, makes a verdict that was not red an error.
            verdict = verdict_without_check(nodeid, report)
            self.results[nodeid] = verdict
            self._row(verdict)
        elif report.failed and report.when == "teardown":
            # A red verdict stays, and its teardown's error is added to it.
            errors = error_lines(report)
            teardown = errors[0] if errors else report.longreprtext.strip()
            self.results[nodeid] = dataclasses.replace(recorded, teardown=teardown)

    def _row(self, result: Verdict) -> Row:
        """Return the row of the verdict's cell, which is made for its first verdict."""
        return self.cells.setdefault(_key(result), Row.of(result))

    def _properties(self, nodeid: str, report: pytest.TestReport) -> list[tuple[str, object]]:
        """Return the properties of a distributed test, for JUnit's file and report logs.

        Returns:
            Name and value of each, as ``("distcompat_cell", "fsdp2-fp32-w2")``: cell, driver,
            check, status, the rank of the cause, and versions. Empty for an ordinary test.
        """
        values: dict[str, object] = {}
        result = self.results.get(nodeid)
        if result is not None:
            values = {
                "cell": result.cell,
                "driver": result.driver,
                "check": result.check,
                "status": result.status.name,
                "rank": result.rank,
            }
        elif "distcompat" in report.keywords and parse_suite_item(nodeid) is None:
            # A test with @pytest.mark.distcompat: its cell, where it has one, is in its id, as in
            # ``test_a.py::test_sum[ddp-fp32-w2]``.
            parameters = nodeid.rpartition("[")[2].rstrip("]")
            cell = parameters if facets(parameters) else None
            values = {"cell": cell}
        if not values:
            return []
        versions_text = []
        for name, version in self._versions.items():
            versions_text.append(f"{name} {version}")
        values["versions"] = ", ".join(versions_text)
        properties = []
        for name, value in values.items():
            if value is not None:
                properties.append((f"distcompat_{name}", value))
        return properties

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Note what ended the session early.

        pytest calls this for Ctrl-C and ``pytest.exit()``, and under xdist also for ``-x`` and
        ``--stepwise``.
        """
        by_user = excinfo.type in {KeyboardInterrupt, pytest.exit.Exception}
        self._ending = "interrupted" if by_user else "stopped"

    # tryfirst: pytest's own hook removes its temporary directories, and with them the store.
    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Make the report, write its files, and set the session's exit code.

        This is not done in the terminal summary: a session that was interrupted may have none.
        """
        if self._progress is not None:
            self._progress.stop()
        # For the order of tests in the next session.
        keep_durations(self.session, exitstatus)
        self._shard = self.session.shared(SHARDS)
        # Both are read now, because pytest removes the store before the summary.
        self._left_out = self.session.shared(LEFT_OUT) or []
        # With more machines than cells some have nothing to do, which is no failure.
        if self._has_empty_shard() and session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
            session.exitstatus = pytest.ExitCode.OK
        if not self._running or not self._needs_report(session.config):
            return
        self.report = self._report(exitstatus)
        # Of failures with one cause pytest then shows one.
        fold_failures(session.config, self.report.results)
        self._compare(session)
        self._require_a_verdict(session)
        self._write_files(session, self.report)
        # As telemetry, if the environment asks for that; a line says where to.
        sent = send(self.report)
        if sent:
            self._written.append(sent)

    def _has_empty_shard(self) -> bool:
        """Tell whether the session has no tests because they are all in other shards."""
        if self._shard is None:
            return False
        plan = self._shard["plan"]
        own_units = plan[self._shard["number"] - 1]
        return any(plan) and not own_units

    def _needs_report(self, config: pytest.Config) -> bool:
        """Tell whether the session has suites, or should have had some."""
        if self.results or self.collected or self.without_cells:
            return True
        # The user wants a report or a comparison, so suites were expected: the report says that
        # there are none, unless a selection explains it.
        report_files = self.session.setting("report").value
        baseline = self.session.setting("baseline").value
        if not report_files and not baseline:
            return False
        return bool(self._shard) or not is_narrowed(config)

    def _write_files(self, session: pytest.Session, report: Report) -> None:
        """Write the report files, and the summary of a GitHub step."""
        for path in self.session.setting("report").value:
            try:
                write_report(path, report)
            except OSError as error:
                self._written.append(_not_written(path, error))
                if session.exitstatus in _GOOD:
                    session.exitstatus = pytest.ExitCode.TESTS_FAILED
            else:
                self._written.append(f"report: {path}")
        summary = os.environ.get(SUMMARY)
        if summary:
            try:
                append_summary(Path(summary), report)
            except OSError as error:
                # The user did not request this file, so that the session does not fail.
                self._written.append(_not_written(Path(summary), error))

    def _report(self, exitstatus: int) -> Report:
        """Return the report of the session: its verdicts, cells, runs and times.

        Args:
            exitstatus: pytest's exit code of the session.
        """
        from pytest_distcompat.evidence.store import add_evidence, read_store

        runs = read_store(self.session.runs)
        finished_runs = 0
        for run in runs:
            finished_runs += bool(run.done)
        unreached = []
        for nodeid in self.collected:
            if nodeid not in self.results:
                unreached.append(nodeid)
        about_session = session_info(self.session, self._versions, self._began)
        about_session["ending"] = self._ending_of(exitstatus, unreached)
        about_session["runs"] = finished_runs
        if self._shard:
            number = self._shard["number"]
            about_session["shard"] = {"number": number, "plan": self._shard["plan"]}
        # A line for each of the user's known issues that excused nothing.
        about_session["remove"] = declared_of(self.session).stale()
        ordered = self.ordered()
        rows = {}
        for result in ordered:
            key = _key(result)
            rows[key] = self.cells[key]
        results = with_device_seconds(ordered, about_session["timeline"])
        report = Report(about_session, results, list(rows.values()), unreached=unreached)
        # An item that failed outside its check does not know the driver of its suite.
        report.fill_drivers()
        # Only files show what was trained, and to read all trainings again takes seconds.
        report_files = self.session.setting("report").value
        has_files = bool(report_files or os.environ.get(SUMMARY))
        add_evidence(report, runs, trainings=has_files)
        return report

    def _ending_of(self, exitstatus: int, unreached: list[str]) -> str:
        """Return how the session ended.

        Args:
            exitstatus: pytest's exit code of the session.
            unreached: The node ids of items that were collected and did not run.

        Returns:
            ``interrupted``, ``internal error``, ``stopped`` (as by ``-x``) or ``finished``.
        """
        if self._ending:
            return self._ending
        if exitstatus == pytest.ExitCode.INTERNAL_ERROR:
            return "internal error"
        return "stopped" if unreached else "finished"

    def _compare(self, session: pytest.Session) -> None:
        """Compare with the baseline, if there is one, and set the session's exit code by that.

        Only what is newly broken or missing fails the session; what was red in the baseline already
        does not. Items that -k, a node id or another shard leaves out are not missing.
        """
        before = self.session.setting("baseline").value
        if before is None or self.report is None:
            return
        comparison = compare(before, self.report)
        # Only a part of the tests was selected, by -k say (``is_narrowed``). Missing is then what
        # was selected and did not run: a verdict that is skipped now, or an item that was not
        # reached.
        if self._shard or is_narrowed(session.config):
            missing = []
            for change in comparison.missing:
                if change.after or change.why == "not reached":
                    missing.append(change)
            comparison.missing = missing
        regressed = bool(comparison.broken or comparison.missing)
        # Whether all failures are verdicts, which the baseline may know. pytest counts other
        # failures too: of ordinary tests, of modules that cannot be imported, and of plugins
        # (pytest-cov).
        only_verdicts = 0 < session.testsfailed == self._own_failures
        about_session = self.report.session
        about_session["baseline"] = comparison.to_json(self.session.setting("baseline").text)
        if regressed and session.exitstatus in _GOOD:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        elif session.exitstatus == pytest.ExitCode.TESTS_FAILED and only_verdicts and not regressed:
            session.exitstatus = pytest.ExitCode.OK
            about_session["baseline"]["text"].append(
                "nothing is newly broken or newly missing: exit code 0"
            )

    def _require_a_verdict(self, session: pytest.Session) -> None:
        """Fail a session in which suites were collected and none of their cells ran.

        Nothing was checked, which is no success. A typical reason is a package that is not
        installed.
        """
        if not (self.collected or self.without_cells):
            return
        may_run_nothing = self.session.setting("nothing_ran").value == "pass"
        if may_run_nothing or session.exitstatus not in _GOOD:
            return
        for result in self.results.values():
            if result.status != "skipped":
                return
        if self._can_run_elsewhere():
            return
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        self._nothing_ran = nothing_ran_lines(self.ordered(), self.without_cells)

    def _can_run_elsewhere(self) -> bool:
        """Tell whether the cells that can run are all in other shards."""
        if not self._shard:
            return False
        can_run = self._shard["can_run"]
        own_can_run = can_run[self._shard["number"] - 1]
        return any(can_run) and not own_can_run

    def ordered(self) -> list[Verdict]:
        """Return the results in the order of the matrix, whatever the order in which items ran."""
        from pytest_distcompat.checks import all_check_names
        from pytest_distcompat.precisions import PRECISIONS
        from pytest_distcompat.strategies import STRATEGIES

        strategies = STRATEGIES.names()
        precisions = PRECISIONS.names()
        checks = all_check_names()

        def matrix_order(result: Verdict) -> tuple[object, ...]:
            # In a suite: cells without options first, then by strategy, precision and world size.
            cell = Cell.parse(result.cell)
            return (
                result.suite,
                len(cell.options),
                str(cell.options),
                strategies.index(cell.strategy),
                precisions.index(cell.precision),
                cell.spread,
                checks.index(result.check),
            )

        return sorted(self.results.values(), key=matrix_order)

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print the matrix and the paths of the report files."""
        if self.report is not None:
            written = [*self._left_out, *self._written]
            show(terminalreporter, self.report, written, self._nothing_ran)


def _key(result: Verdict) -> str:
    """Return the key of a verdict's row: the node id of its suite, and its cell."""
    return f"{result.place}:{result.cell}"


def _not_written(path: Path, error: OSError) -> str:
    """Return the line about a report file that could not be written."""
    return f"report: {path} could not be written: {error.strerror}"
