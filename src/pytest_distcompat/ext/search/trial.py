"""Trials: run a candidate on real ranks, read which branches it reaches, and judge it by a law."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Sequence
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
from pytest_distcompat.ext.walk.explore import run_walk
from pytest_distcompat.ext.walk.sequence import Walk
from pytest_distcompat.judge import ACCIDENTS
from pytest_distcompat.known import applying, concerned, shipped
from pytest_distcompat.profiles import SWEEP_CHECKS
from pytest_distcompat.runner import Runner
from pytest_distcompat.settings.rules import meant_to_fail, rule_of
from pytest_distcompat.status import Status
from pytest_distcompat.trace import RunFailure

if TYPE_CHECKING:
    from typing_extensions import Self

#: The seconds after which a run hangs: the models are tiny.
_TIMEOUT = 60
#: Checks with runs of their own that a candidate gets which reached something new.
_DEEP_CHECKS = ("resume", "export")
#: An exception and its message, as the last line of a traceback has them.
_EXCEPTION = re.compile(r"(?P<kind>[\w.]+): \S")
#: The statement that raised it, the last one that a traceback shows.
_STATEMENT = re.compile(r"^\s+(?P<statement>(?:raise|assert)\b)", re.MULTILINE)


@dataclass(frozen=True)
class Outcome:
    """What came of a candidate.

    Attributes:
        branches: All branches that it reached.
        problem: How it breaks the law: the check or call, and the first finding; empty if it does not.
        refused: The words with which the stack refused it; empty if it did not.
        seconds: How long it took.
    """

    branches: Branches
    problem: str
    refused: str
    seconds: float


class Trials:
    """Runs candidates, on fork servers that begin with the first candidate of a driver.

    Args:
        known: The branches that are not new. Candidates that reach others get more checks. What they reach is not added here.
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
        """Run a candidate and judge it."""
        began = clock.now()
        runner = self._runner(candidate.driver)
        before = dict(runner.started)
        if candidate.calls:
            problem, refused = _judge_calls(runner, candidate)
            branches = self._branches(runner, before)
        else:
            kind = find_driver(candidate.driver)
            problem, refused = _judge_cell(runner, candidate, _checks(candidate, kind))
            branches = self._branches(runner, before)
            if not (problem or refused) and len(branches.without(self.known)):
                problem, refused = _judge_cell(runner, candidate, _deep_checks(candidate, kind))
                branches.add(self._branches(runner, before))
        _remove_runs(runner, before)
        return Outcome(branches, problem, refused, clock.now() - began)

    def _runner(self, driver: str) -> Runner:
        if driver not in self._runners:
            kind = find_driver(driver)
            cells = [Cell.of("ddp", "fp32", model=model) for model in ("mlp", "llama")]
            runner = self._stack.enter_context(local_runner(kind, cells, device="cpu", timeout=_TIMEOUT))
            runner.recorders = (f"{tracer.__name__}:{tracer.rank_tracer.__name__}",)
            self._runners[driver] = runner
        return self._runners[driver]

    def _branches(self, runner: Runner, before: dict[Path, str]) -> Branches:
        """Return what the runs reached that were started since."""
        return self.installed.read(directory for directory in runner.started if directory not in before)


def _remove_runs(runner: Runner, before: dict[Path, str]) -> None:
    """Remove the files of runs that were started since; references stay, since other candidates have the same."""
    for directory, name in runner.started.items():
        if directory not in before and name != "reference":
            shutil.rmtree(directory, ignore_errors=True)


def _checks(candidate: Candidate, kind: type[Driver]) -> list[str]:
    """Return the checks of a training, and those that rules name for its settings."""
    names = [*SWEEP_CHECKS]
    for setting in candidate.cell.set:
        names += rule_of(setting.partition("=")[0]).get("checks", ())
    return _applying(dict.fromkeys(names), candidate, kind)


def _deep_checks(candidate: Candidate, kind: type[Driver]) -> list[str]:
    return _applying(_DEEP_CHECKS, candidate, kind)


def _applying(names: Sequence[str] | dict[str, None], candidate: Candidate, kind: type[Driver]) -> list[str]:
    """Return the checks that apply to the candidate's cell, and that none of its settings is meant to fail."""
    meant = {name for setting in candidate.cell.set for name in meant_to_fail(setting)}
    applying_checks: list[str] = []
    for name in names:
        if name not in meant and not not_applicable(CHECKS.get(name), candidate.cell, kind, {}):
            applying_checks.append(name)
    return applying_checks


def _judge_cell(runner: Runner, candidate: Candidate, names: Sequence[str]) -> tuple[str, str]:
    """Return how a cell breaks the law, and the words that refuse it: every check passes, or it is refused at build."""
    known: list[Expectation] = list(applying(shipped(), concerned(find_driver(candidate.driver)), "cpu"))
    for name in names:
        verdict, _ = run_check(runner, candidate.driver, candidate.cell, CHECKS.get(name), known)
        if verdict.status is Status.REFUSED:
            return "", verdict.reason
        if verdict.status.red and verdict.status is not Status.FIXED:
            first_line = (verdict.message or verdict.reason).strip().partition("\n")[0]
            return f"{name}: {verdict.status}: {first_line[:300]}", ""
    return "", ""


def _judge_calls(runner: Runner, candidate: Candidate) -> tuple[str, str]:
    """Return how calls break the law, and the words that refuse one: they do what one process does, or are refused."""
    kind = find_driver(candidate.driver).live_calls
    assert kind is not None
    done = run_walk(runner, candidate.driver, candidate.cell, Walk(candidate.calls, kind))
    if not done.wrong:
        return "", ""
    for run in done.trace.runs.values():
        if run.end is not None and refuses_in_words(run.end):
            return "", run.end.message
    return done.wrong[0][:300], ""


def refuses_in_words(end: RunFailure) -> bool:
    """Tell whether a run ended with an exception that a library raised on purpose, with a message."""
    exception = _EXCEPTION.search(end.message.partition(" raised ")[2])
    if end.kind != "raised" or exception is None:
        return False
    if re.fullmatch(ACCIDENTS, exception["kind"].rpartition(".")[2]):
        return False
    return any(_STATEMENT.finditer(end.text))
