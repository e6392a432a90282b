"""Trials: run a candidate on real ranks, see which branches it reaches, and judge it by a law.

A *candidate* is a cell of a driver (``torch fsdp2-fp32-w2-model_mlp``), perhaps with calls of the
live trainer. The *stack* is torch and the libraries above it. ``guide.Search`` calls ``Trials.run``
for each candidate, and gets an ``Outcome``.

The law needs no expected values:

- A candidate without calls trains, saves, loads and exports; all checks must pass.
- Calls of a live trainer must have the effect that they have in one process.
- Or the stack refuses the candidate: it raises an exception on purpose, with a message.

Anything else is a *problem*: ``names: failed: file 'model.safetensors': 9 keys have ...``.
"""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_distcompat import clock
from pytest_distcompat.cell import Cell
from pytest_distcompat.checks import CHECKS
from pytest_distcompat.driver import Driver
from pytest_distcompat.drivers import find_driver
from pytest_distcompat.engine import local_runner, not_applicable, run_check
from pytest_distcompat.expect import Expectation
from pytest_distcompat.ext.reach import tracer
from pytest_distcompat.ext.search.candidate import Candidate
from pytest_distcompat.ext.search.reached import Branches, InstalledBranches
from pytest_distcompat.ext.upstream.sweep.rules import meant_to_fail, rule_of
from pytest_distcompat.ext.upstream.sweep.slice import SWEEP_CHECKS
from pytest_distcompat.ext.walk.explore import run_walk
from pytest_distcompat.ext.walk.sequence import Walk
from pytest_distcompat.judge import ACCIDENTS
from pytest_distcompat.known import applying, names_in_issues, shipped
from pytest_distcompat.runner import Runner
from pytest_distcompat.status import Status
from pytest_distcompat.trace import RunFailure

if TYPE_CHECKING:
    from typing_extensions import Self

#: The seconds after which a run counts as hung. The models are tiny.
_TIMEOUT = 60
#: Checks that need further runs than ``train`` and its reference. Only a candidate that has reached
#: new branches gets them.
_DEEP_CHECKS = ("resume", "export")
#: An exception with a message, as in the last line of a traceback: ``ValueError: no such ...``.
_EXCEPTION = re.compile(r"(?P<kind>[\w.]+): \S")
#: A source line of a traceback that raises on purpose: a ``raise`` or ``assert``.
_RAISED_ON_PURPOSE = re.compile(r"^\s+(?:raise|assert)\b", re.MULTILINE)


@dataclass(frozen=True)
class Outcome:
    """What came of a candidate.

    Attributes:
        branches: All branches that it reached, also known ones.
        problem: How it breaks the law: the check or call, and the first line of the message; empty
            if it does not.
        refused: The message of the exception with which the stack refused it; empty if it did not.
        seconds: How long it took.
    """

    branches: Branches
    problem: str
    refused: str
    seconds: float


class Trials:
    """Runs candidates. It is a context manager, which ends the processes that it started.

    A driver's processes (fork servers, from which ranks are forked) start with its first candidate.

    Args:
        known: The branches that are not new. A candidate that reaches others gets more checks. The
            caller adds what it reached.
    """

    def __init__(self, known: Branches) -> None:
        self.known = known
        self.installed = InstalledBranches()
        self._runners: dict[str, Runner] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the fork servers."""
        self._stack.close()

    def run(self, candidate: Candidate) -> Outcome:
        """Run a candidate and judge it.

        A runner keeps its runs for later checks; ``started`` maps the directory of each to its
        name, such as ``train``. In those that this candidate added each rank has written which
        lines it executed. They are read, and then removed.
        """
        began = clock.now()
        runner = self._runner(candidate.driver)
        earlier_runs = dict(runner.started)
        if candidate.calls:
            judgement = _judge_calls(runner, candidate)
            branches = self._branches(runner, earlier_runs)
        else:
            driver = find_driver(candidate.driver)
            judgement = _judge_cell(runner, candidate, _checks(candidate, driver))
            branches = self._branches(runner, earlier_runs)
            reached_new = len(branches.without(self.known)) > 0
            if judgement == _PASSED and reached_new:
                judgement = _judge_cell(runner, candidate, _deep_checks(candidate, driver))
                branches.add(self._branches(runner, earlier_runs))
        _remove_runs(runner, earlier_runs)
        return Outcome(branches, judgement.problem, judgement.refused, clock.now() - began)

    def _runner(self, driver: str) -> Runner:
        """Return the runner of all candidates of a driver; the first call starts it."""
        if driver not in self._runners:
            # The fork servers import what the cells of these two models need.
            cells = [Cell.of("ddp", "fp32", model=model) for model in ("mlp", "llama")]
            local = local_runner(find_driver(driver), cells, device="cpu", timeout=_TIMEOUT)
            runner = self._stack.enter_context(local)
            # Each rank then runs with the tracer, which records the executed lines in a file.
            runner.recorders = (f"{tracer.__name__}:{tracer.rank_tracer.__name__}",)
            self._runners[driver] = runner
        return self._runners[driver]

    def _branches(self, runner: Runner, earlier_runs: Collection[Path]) -> Branches:
        """Return the branches that new runs have reached, which are not among the earlier ones."""
        new_runs: list[Path] = []
        for directory in runner.started:
            if directory not in earlier_runs:
                new_runs.append(directory)
        return self.installed.read(new_runs)


def _remove_runs(runner: Runner, earlier_runs: Collection[Path]) -> None:
    """Remove the directories of new runs. A search of hours would fill the disk.

    The run ``reference`` (the same training in one process) stays, since it serves other candidates
    too.
    """
    for directory, name in runner.started.items():
        if directory not in earlier_runs and name != "reference":
            shutil.rmtree(directory, ignore_errors=True)


def _checks(candidate: Candidate, driver: type[Driver]) -> list[str]:
    """Return the names of the checks for a candidate without calls.

    They are those of the profile ``sweep``, and those that the rules of its settings name.
    """
    names = [*SWEEP_CHECKS]
    for setting in candidate.cell.set:
        name, _, _ = setting.partition("=")
        names += rule_of(name).get("checks", ())
    return _applying(dict.fromkeys(names), candidate, driver)


def _deep_checks(candidate: Candidate, driver: type[Driver]) -> list[str]:
    """Return the names of further checks, for a candidate that has reached new branches."""
    return _applying(_DEEP_CHECKS, candidate, driver)


def _applying(names: Iterable[str], candidate: Candidate, driver: type[Driver]) -> list[str]:
    """Return which of these checks apply to the candidate's cell.

    A check that one of its settings is meant to fail, by the rules of the profile ``sweep``, is
    left out.
    """
    meant: set[str] = set()
    for setting in candidate.cell.set:
        meant.update(meant_to_fail(setting))
    applying_checks: list[str] = []
    for name in names:
        if name in meant:
            continue
        # A trial has no limits of measured numbers, so checks of these do not apply.
        limits: dict[str, float] = {}
        if not not_applicable(CHECKS.get(name), candidate.cell, driver, limits):
            applying_checks.append(name)
    return applying_checks


@dataclass(frozen=True)
class _Judgement:
    """A judgement; both texts are empty if the candidate keeps the law.

    Attributes:
        problem: How it breaks the law, see ``Outcome``.
        refused: The message with which the stack refused it.
    """

    problem: str = ""
    refused: str = ""


_PASSED = _Judgement()


def _judge_cell(runner: Runner, candidate: Candidate, names: Sequence[str]) -> _Judgement:
    """Judge a candidate without calls: all these checks pass, or the stack refuses the cell.

    Known issues (declared bugs of the libraries) are no problems.
    """
    names_of_driver = names_in_issues(find_driver(candidate.driver))
    known: list[Expectation] = list(applying(shipped(), names_of_driver, "cpu"))
    for name in names:
        check = CHECKS.get(name)
        verdict, _ = run_check(runner, candidate.driver, candidate.cell, check, known)
        if verdict.status is Status.REFUSED:
            return _Judgement(refused=verdict.reason)
        # ``FIXED``: a declared bug does not show, which is no problem.
        if verdict.status.red and verdict.status is not Status.FIXED:
            message = verdict.message or verdict.reason
            first_line, _, _ = message.strip().partition("\n")
            return _Judgement(problem=f"{name}: {verdict.status}: {first_line[:300]}")
    return _PASSED


def _judge_calls(runner: Runner, candidate: Candidate) -> _Judgement:
    """Judge a candidate with calls: they do what they do in one process, or one is refused.

    A walk is a sequence of calls of one live trainer. ``run_walk`` makes the calls, compares the
    state after each with that of one process, and returns texts for what is wrong.
    """
    kind = find_driver(candidate.driver).live_calls
    assert kind is not None
    walk = Walk(candidate.calls, kind)
    outcome = run_walk(runner, candidate.driver, candidate.cell, walk)
    if not outcome.wrong:
        return _PASSED
    for run in outcome.trace.runs.values():
        if run.end is not None and refuses_in_words(run.end):
            return _Judgement(refused=run.end.message)
    problem = _first_unknown(candidate, outcome.wrong)
    return _Judgement(problem=problem[:300])


def _first_unknown(candidate: Candidate, problems: Sequence[str]) -> str:
    """Return the first of the problems that no known issue explains; empty if all are known."""
    names_of_driver = names_in_issues(find_driver(candidate.driver))
    known = applying(shipped(), names_of_driver, "cpu")
    covering = [issue for issue in known if issue.covers(candidate.cell, "walk")]
    for problem in problems:
        is_known = any(issue.matches(problem) for issue in covering)
        if not is_known:
            return problem
    return ""


def refuses_in_words(end: RunFailure) -> bool:
    """Tell whether a run ended with an exception that a library raised on purpose.

    It has a message, its type is none of ``ACCIDENTS`` (``KeyError``, ...), and its traceback has a
    ``raise`` or ``assert``.
    """
    # The message of a failed run is ``rank 1 raised ValueError: ...``.
    _, _, exception_text = end.message.partition(" raised ")
    exception = _EXCEPTION.search(exception_text)
    if end.kind != "raised" or exception is None:
        return False
    _, _, class_name = exception["kind"].rpartition(".")
    if re.fullmatch(ACCIDENTS, class_name):
        return False
    return _RAISED_ON_PURPOSE.search(end.text) is not None
