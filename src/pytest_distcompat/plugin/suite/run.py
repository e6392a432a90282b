"""A case that runs: its verdict, its report, and what its ranks wrote.

A *suite* is a subclass of ``CompatSuite``; it names a *driver*, the trainer as a class. A *case* is
one item of it: one *check* in one *cell*, as ``TestMyTrainer::test[fsdp2-fp32-w2:names]`` is the
check ``names`` in the cell ``fsdp2-fp32-w2`` (strategy, precision, 2 ranks). Its function ``test``
calls the value of the fixture ``distcompat_case``, a ``BoundCase`` of this module:

1. ``engine.run_check`` makes sure that the *runs* that the check needs have run, such as a training
   and a resumed one. A run is one process group from start to end; its *ranks* are processes of
   their own. All checks of a cell share runs. What the ranks recorded is the *trace*.
2. The check reads the trace. Its findings become a *verdict*: passed, failed, crashed, known and so
   on, by what the suite and *known issues* (bugs of other projects) declare.
3. ``BoundCase`` stores the verdict and ends as it says: it returns, skips, xfails or raises.
4. The hook ``pytest_runtest_makereport`` calls ``finish_report``, which attaches the verdict to
   pytest's report. xdist sends that to the process with the terminal, where ``Results`` gathers it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pytest_distcompat.cost import cost
from pytest_distcompat.drivers import find_driver
from pytest_distcompat.engine import run_check
from pytest_distcompat.excerpt import excerpt
from pytest_distcompat.expect import Expectation
from pytest_distcompat.failures import (
    DistcompatError,
    Incompatible,
    LateFailure,
    RunFailedError,
)
from pytest_distcompat.judge import declaration, skipped
from pytest_distcompat.known import names_in_issues
from pytest_distcompat.launch.files import written
from pytest_distcompat.launch.forensics.ending import name_ranks
from pytest_distcompat.launch.request import Request
from pytest_distcompat.plugin.declared import declared_of, take_xfail_from_hard
from pytest_distcompat.plugin.marked.outcome import disagreement
from pytest_distcompat.plugin.marked.phase import SECTION_CHARACTERS
from pytest_distcompat.plugin.reporting.representation import represent
from pytest_distcompat.plugin.reporting.results import ATTRIBUTE
from pytest_distcompat.plugin.session import SESSION, DistcompatSession
from pytest_distcompat.plugin.suite.case import Case
from pytest_distcompat.plugin.suite.why_not import why_not_run
from pytest_distcompat.status import Status, Verdict
from pytest_distcompat.trace import RunFailure, Trace

#: Where an item has its verdict: the dictionary that ``results.ATTRIBUTE`` explains.
VERDICT: pytest.StashKey[dict[str, Any]] = pytest.StashKey()
#: Where an item has the output of its ranks, as sections of its report: (title, text).
OUTPUT: pytest.StashKey[list[tuple[str, str]]] = pytest.StashKey()
#: The exception for a failing verdict, by its status; ``Incompatible`` for any other. A ``hard``
#: one is more than an exception on a rank, and no xfail mark excuses it.
FAILURES: Mapping[str, Callable[[str], DistcompatError]] = {
    Status.LATE: LateFailure,
    Status.CRASHED: functools.partial(RunFailedError, hard=True),
    Status.HUNG: functools.partial(RunFailedError, hard=True),
    Status.LEAKED: functools.partial(RunFailedError, hard=True),
}


class BoundCase:
    """The value of the fixture ``distcompat_case``: a call runs the case, as ``__call__`` says."""

    def __init__(self, case: Case, item: pytest.Function) -> None:
        self.case, self.item = case, item
        #: The fields of ``cost.Cost``; empty if the trace has no training to measure.
        self._cost: dict[str, Any] = {}
        #: What the user could declare in the suite if this failure is known; None for no failure.
        self._declaration: Expectation | None = None

    def __call__(self) -> None:
        """Run the case, and end as its verdict says.

        Raises:
            pytest.skip.Exception: For a case that was not run, or not on real ranks.
            pytest.xfail.Exception: For a known failure.
            DistcompatError: For any other verdict but a success, see ``FAILURES``.
        """
        __tracebackhide__ = True
        session = self.item.config.stash[SESSION]
        verdict, command = self._verdict(session)
        verdict = dataclasses.replace(
            verdict,
            suite=self.case.suite.__name__,
            driver=self.case.suite.driver,
            nodeid=session.nodeid_of(self.item),
            reproduce=session.reproduce(self.item),
        )
        self.item.stash[VERDICT] = {
            "verdict": verdict.to_json(),
            "not_applicable": dict(self.case.not_applicable),
            "cost": self._cost,
        }
        # Skipped, or run on a stand-in for ranks, which shows less than real ones.
        if not verdict.status.conclusive:
            pytest.skip(verdict.reason)
        if verdict.status is Status.KNOWN:
            # As ``pytest.xfail`` does, but without a traceback, whose source pytest would parse.
            raise pytest.xfail.Exception(verdict.reason, pytrace=False)
        if not verdict.ok:
            failure = FAILURES.get(verdict.status, Incompatible)
            raise failure(self._text(verdict, command))

    def _verdict(self, session: DistcompatSession) -> tuple[Verdict, str]:
        """Run the case.

        Returns:
            The verdict, and the ``torchrun`` command that repeats the run that ended early, or else
            the last run; empty if nothing ran.
        """
        case = self.case
        reason = why_not_run(case, session)
        reason = reason or session.over_budget(case.suite.driver, case.cell)
        if reason:
            return skipped(case.check.name, case.cell, reason), ""
        # From now on it has the runs that this case is the first to need.
        session.runner.started.clear()
        verdict, trace = self._judge(session)
        name, failure = _quoted_run(trace, verdict.message)
        rank = None
        # Only at an exception a debugger (--pdb) can stop.
        rank_that_raised = None
        if failure is not None:
            rank = failure.rank
            if failure.kind == "raised":
                rank_that_raised = rank
        command = _command_of(trace)
        session.note_failed_run(self.item, command, rank_that_raised)
        # If the ranks were on several machines: with the machine of each rank that it names.
        message = trace.name_hosts(verdict.message)
        verdict = dataclasses.replace(verdict, ended_run=name, rank=rank, message=message)
        self._show_output(session, verdict)
        return verdict, command

    def _judge(self, session: DistcompatSession) -> tuple[Verdict, Trace]:
        """Run the check, and judge it by what the suite and known issues expect.

        Returns:
            The verdict, and the trace from which it was made.
        """
        case = self.case
        driver = find_driver(case.suite.driver)
        # Issues name the libraries with the bug: those that concern this driver's libraries.
        known = session.known_of(names_in_issues(driver), session.nodeid_of(self.item))
        # The suite's own expectations come first.
        expected = list(case.suite.expect)
        for issue in known:
            expected += issue.expectations
        verdict, trace = run_check(
            session.runner, case.suite.driver, case.cell, case.check, expected
        )
        # None if the check reads no training.
        used = cost(trace, session.gpu_name)
        if used:
            self._cost = dataclasses.asdict(used)
        if verdict.status is Status.FAILED and not verdict.reason:
            self._declaration = declaration(case.check, case.cell, trace)
        verdict = self._verified(verdict, expected, session)
        # At its end the session tells of issues of the user's that no failure needed.
        declared_of(session).note_verdict(self.item, known, case.cell, verdict)
        return verdict, trace

    def _verified(
        self, verdict: Verdict, expected: Sequence[Expectation], session: DistcompatSession
    ) -> Verdict:
        """Run a sample of the checks again under cold torchrun (``--distcompat-verify``).

        Args:
            verdict: The verdict on warm ranks, which are forked from a process with all libraries.
            expected: What the suite and known issues declare.
            session: The plugin's session.

        Returns:
            The same verdict; a failure if the second verdict has another status.
        """
        case = self.case
        # Two cases cannot be compared. A check with a limit measures a number, which differs from
        # run to run. And cold torchrun starts all ranks on this machine.
        if case.check.limit or not case.cell.spread.on_one:
            return verdict
        if not session.verifies(session.nodeid_of(self.item)):
            return verdict
        driver = case.suite.driver
        cold, _ = run_check(session.cold_runner, driver, case.cell, case.check, expected)
        if cold.status == verdict.status:
            return verdict
        # What can be declared is a failure that both have.
        self._declaration = None
        message = disagreement(verdict.status, cold.status, cold.message or verdict.message)
        return dataclasses.replace(verdict, status=Status.FAILED, message=message)

    def _show_output(self, session: DistcompatSession, verdict: Verdict) -> None:
        """Store the output of the ranks for the report, or print it without capture (``-s``).

        A failed item shows the run that ended early, or else all runs that its check reads. Any
        other item shows only the runs that it has started, because checks share runs.
        """
        config = self.item.config
        shows_output = config.getoption("capture", "no") in {"no", "tee-sys"}
        # Nobody sees what a worker of xdist prints.
        if shows_output and not hasattr(config, "workerinput"):
            for title, content in sections(session.runner.started):
                print(f"\n{title}:\n{content}")  # noqa: T201 - it is what the ranks printed
        elif verdict.status.red:
            self.item.stash[OUTPUT] = sections(self._runs_of_failure(session, verdict))
        else:
            self.item.stash[OUTPUT] = sections(session.runner.started)

    def _runs_of_failure(self, session: DistcompatSession, verdict: Verdict) -> dict[Path, str]:
        """Return the run that ended early, or else all runs that the check reads.

        Returns:
            The directory of each run to its name, as ``train``.
        """
        case = self.case
        scenario = case.check.runs(case.cell, find_driver(case.suite.driver))
        runs = session.runner.directories(case.suite.driver, case.cell, scenario)
        if not verdict.ended_run:
            return runs
        return {directory: name for directory, name in runs.items() if name == verdict.ended_run}

    def _text(self, verdict: Verdict, command: str) -> str:
        """Return the text of a failure.

        Args:
            verdict: The verdict, which is no success.
            command: The command that repeats a run; empty if nothing ran.
        """
        # The finding comes first, because summaries and JUnit show the first line only.
        place = f"{verdict.cell}: {verdict.check}: {verdict.status}"
        lines = [verdict.message.rstrip(), "", place]
        if verdict.status is Status.FAILED and not verdict.ended_run:
            # If a run ended early, the message has the cause already.
            lines += [f"the claim: {self.case.check.text}", ""]
        if self._declaration is not None:
            lines.append(f"if that is known, declare it in expect: {self._declaration},")
        lines.append(f"reproduce: {verdict.reproduce}")
        if command:
            lines.append(f"this run alone: {command}")
        return "\n".join(lines)


def _command_of(trace: Trace) -> str:
    """Return the command of the first run that ended early, or else of the last run.

    The result is empty without runs.
    """
    # The notes of a trace have the ``torchrun`` command of each run by its name.
    commands = list(trace.notes.values())
    last = commands[-1] if commands else ""
    for run in trace:
        if run.end is not None:
            return trace.notes.get(run.name) or last
    return last


def _quoted_run(trace: Trace, message: str) -> tuple[str, RunFailure | None]:
    """Return name and end of the first run that ended early and whose message a verdict quotes.

    The result is ``("", None)`` if there is none, as for a check that has findings of its own.

    Args:
        trace: What the ranks recorded, run by run.
        message: The message of the verdict.
    """
    for run in trace:
        if run.end is not None and run.end.message and run.end.message in message:
            return run.name, run.end
    return "", None


def finish_report(
    item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport
) -> None:
    """Attach the verdict to the report, and show its message without frames of this plugin."""
    setattr(report, ATTRIBUTE, item.stash.get(VERDICT, None))
    output = item.stash.get(OUTPUT, None)
    if output is not None:
        report.sections.extend(output)
    error = call.excinfo.value if call.excinfo is not None else None
    if isinstance(error, DistcompatError):
        represent(report, str(error))
        # A crash, a hang or a leak is a failure in spite of an xfail mark.
        take_xfail_from_hard(report, error)


@dataclass(frozen=True)
class _Written:
    """What a rank wrote to one stream.

    Attributes:
        kind: The stream, as ``stdout``.
        run: The name of the run, as ``train``.
        text: What it wrote.
    """

    kind: str
    run: str
    text: str


def sections(runs: Mapping[Path, str]) -> list[tuple[str, str]]:
    """Return report sections with the output of all ranks.

    Ranks with the same output share a section, as ``("Captured stdout of train (ranks 0 and 1)",
    "...")``.

    Args:
        runs: The directory of each run to its name.
    """
    ranks: dict[_Written, list[int]] = {}
    for directory, name in runs.items():
        for rank in range(_world_size_of_run(directory)):
            for kind, text in written(directory, rank):
                ranks.setdefault(_Written(kind, name, text), []).append(rank)
    shown = []
    for output, numbers in ranks.items():
        ranks_text = name_ranks(numbers)
        title = f"Captured {output.kind} of {output.run} ({ranks_text})"
        shown.append((title, excerpt(output.text, SECTION_CHARACTERS)))
    return shown


def _world_size_of_run(directory: Path) -> int:
    """Return the number of ranks of the run in a directory.

    The result is 0 if the run was not started, because an earlier one failed.
    """
    request = directory / "request.json"
    if not request.exists():
        return 0
    return Request.read(request).world_size
