"""Test items of a suite: validating its class, selecting its cases, and running each case."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest

from pytest_distcompat import profiles
from pytest_distcompat.cell import Cell, Matrix
from pytest_distcompat.checks import CHECKS, Check
from pytest_distcompat.compat_suite import CompatSuite
from pytest_distcompat.cost import cost
from pytest_distcompat.driver import Driver
from pytest_distcompat.drivers import DRIVERS, find_driver, preload_of, unsupported_reason
from pytest_distcompat.engine import not_applicable, run_check
from pytest_distcompat.excerpt import excerpt
from pytest_distcompat.expect import Expectation
from pytest_distcompat.failures import (
    DistcompatError,
    Incompatible,
    LateFailure,
    RunFailedError,
    UsageProblem,
)
from pytest_distcompat.judge import declaration, skipped
from pytest_distcompat.known import concerned
from pytest_distcompat.launch.files import written
from pytest_distcompat.launch.forensics.ending import name_ranks
from pytest_distcompat.launch.request import Request
from pytest_distcompat.plugin.declared import declared_of, take_xfail_from_hard
from pytest_distcompat.plugin.marked.outcome import disagreement
from pytest_distcompat.plugin.marked.phase import SECTION_CHARACTERS
from pytest_distcompat.plugin.reporting.representation import represent
from pytest_distcompat.plugin.reporting.results import ATTRIBUTE
from pytest_distcompat.plugin.selection import case_of, cell_name
from pytest_distcompat.plugin.session import LEFT_OUT, SESSION, DistcompatSession
from pytest_distcompat.plugin.shard import FILE as SHARDS
from pytest_distcompat.plugin.shard import ORDINARY, Shard, divide
from pytest_distcompat.plugin.suite.declared_names import check_names
from pytest_distcompat.plugin.suite.shared_gpu import why_not_through_gloo
from pytest_distcompat.precisions import PRECISIONS
from pytest_distcompat.status import Status, Verdict
from pytest_distcompat.strategies import STRATEGIES
from pytest_distcompat.trace import RunFailure, Trace

VERDICT: pytest.StashKey[dict[str, Any]] = pytest.StashKey()
#: The output of the ranks of an item's runs, as sections of its report.
OUTPUT: pytest.StashKey[list[tuple[str, str]]] = pytest.StashKey()

#: See docs/upstream/deepspeed_visible_uuid.py.
NO_MIG = "DeepSpeed reads CUDA_VISIBLE_DEVICES as numbers, and a MIG instance has none: it is named by its UUID"

#: The exception for a failing verdict, by its status.
FAILURES: Mapping[str, Callable[[str], DistcompatError]] = {
    Status.LATE: LateFailure,
    Status.CRASHED: functools.partial(RunFailedError, hard=True),
    Status.HUNG: functools.partial(RunFailedError, hard=True),
    Status.LEAKED: functools.partial(RunFailedError, hard=True),
}


@dataclass(frozen=True)
class Case:
    """A case of a suite: one check in one cell, which is one test item."""

    suite: type[CompatSuite]
    cell: Cell
    check: Check
    #: The checks that have no item in this cell, each with the reason.
    not_applicable: Mapping[str, str] = field(default_factory=dict, compare=False)
    #: Why the driver cannot run the cell; None if it can.
    unsupported: str | None = field(default=None, compare=False)

    @property
    def id(self) -> str:
        """The id of the item, like ``fsdp2-bf16_upcast-w2:names``."""
        return f"{self.cell.id}:{self.check.name}"


# Whether the class of a suite is right.


def is_base(suite: type[CompatSuite]) -> bool:
    """Tell whether a class is only a base of suites: it has no driver, and it has subclasses."""
    return suite is CompatSuite or (not suite.driver and bool(suite.__subclasses__()))


def validate(suite: type[CompatSuite], world_size: int) -> None:
    """Raise UsageProblem for an override, an unknown name, or an expectation without a cell."""
    _check_overrides(suite)
    _check_kinds(suite)
    driver = find_driver(suite.driver)
    for expectation in suite.expect:
        if not isinstance(expectation, Expectation):
            raise UsageProblem(
                f"{suite.__name__}.expect holds {expectation!r}; expected fails(...) or refuses(...)"
            )
        check_names(expectation)
    cells = list(_all_cells(suite, world_size))
    for cell in cells:
        STRATEGIES.get(cell.strategy)
        PRECISIONS.get(cell.precision)
    for expectation in suite.expect:
        if not _covers_any(suite, expectation, cells):
            raise UsageProblem(
                f"{suite.__name__}.expect: {expectation} covers no cell of the matrix ({driver.name or suite.driver})"
            )


def _check_overrides(suite: type[CompatSuite]) -> None:
    for name in vars(CompatSuite):
        if name.startswith("test") and getattr(suite, name, None) is not getattr(CompatSuite, name):
            raise UsageProblem(
                f"{suite.__name__} overrides {name!r}. A standard test is not overridden: say what does not hold with "
                "expect = (fails(...), refuses(...))"
            )


def _check_kinds(suite: type[CompatSuite]) -> None:
    """Check the types of the class's attributes, and that it has a driver."""
    for name, kind in (("driver", str), ("matrix", Matrix), ("expect", tuple)):
        if not isinstance(getattr(suite, name), kind):
            raise UsageProblem(
                f"{suite.__name__}.{name} is {getattr(suite, name)!r}; expected a {kind.__name__}"
            )
    if not suite.driver:
        raise UsageProblem(
            f"{suite.__name__} has no driver (driver = {suite.driver!r}): expected module:attribute, or one of "
            f"{', '.join(DRIVERS.names())}"
        )


def _covers_any(suite: type[CompatSuite], expectation: Expectation, cells: Iterable[Cell]) -> bool:
    """Tell whether an expectation covers a check in any of these cells.

    Counts of ranks and machines are ignored if the suite's matrix does not set them. They come from
    options then, so the expectation may cover cells of another session.
    """
    ignored = suite.matrix.counts_of_session()
    facets = []
    for name, wanted in expectation.facets:
        if name not in ignored:
            facets.append((name, wanted))
    applicable = dataclasses.replace(expectation, facets=tuple(facets))
    for cell in cells:
        if any(applicable.covers(cell, check) for check in CHECKS.names()):
            return True
    return False


def _all_cells(suite: type[CompatSuite], world_size: int) -> Iterator[Cell]:
    return suite.matrix.cells(STRATEGIES.names(), PRECISIONS.names(), world_size)


# Which cases a suite has in this session.


def cases(suite: type[CompatSuite], session: DistcompatSession) -> list[Case]:
    """Return the cases of a suite in this session: the selected cells with their checks.

    A cell that cannot run is one case, whose skip gives the reason.
    """
    drivers = session.setting("drivers").value
    if drivers and suite.driver not in drivers:
        return []
    driver = find_driver(suite.driver)
    profile = session.setting("profile").value
    added_profile = profiles.find_added(profile) if session.substitute is None else None
    check = None if added_profile is None else added_profile.check
    cells = _selected_cells(suite, driver, session, any_precision=check is not None)
    if check is not None:
        return [
            Case(suite, cell, check, unsupported=why_not_supported(driver, cell, session))
            for cell in cells
        ]
    unsupported = {cell: why_not_supported(driver, cell, session) for cell in cells}
    not_applicable = {cell: _checks_without_verdict(cell, driver, session) for cell in cells}
    _leave_out(profile, not_applicable, unsupported)
    selected: list[Case] = []
    for cell, reasons in not_applicable.items():
        for check in CHECKS.by_name.values():
            if check.name not in reasons:
                selected.append(Case(suite, cell, check, reasons, unsupported[cell]))
                if unsupported[cell]:
                    break
    selected += _added_cases(suite, driver, session)
    return selected


def _is_built_in(suite: type[CompatSuite]) -> bool:
    return suite.__module__.startswith("pytest_distcompat.")


def _selected_cells(
    suite: type[CompatSuite],
    driver: type[Driver],
    session: DistcompatSession,
    *,
    any_precision: bool,
) -> list[Cell]:
    """Return the cells that the profile derives from the suite's matrix and options select.

    Args:
        suite: The suite.
        driver: Its driver.
        session: The session, with the options.
        any_precision: Whether to ignore options that select precisions.
    """
    profile = session.setting("profile").value
    matrix = session.placement.spread_matrix(suite.matrix)
    names = (STRATEGIES.names(), PRECISIONS.names())
    cells = profiles.cells(
        profile,
        matrix,
        driver=driver,
        names=names,
        world_size=session.world_size,
        device=session.device,
        shared=lambda: session.store,
    )
    if session.substitute is not None:
        cells = session.substitute.cells(cells)
    elif not _is_built_in(suite):
        _count_left_out(suite, driver, matrix.cells(*names, session.world_size), cells, session)
    selected = []
    for cell in cells:
        if session.selects(cell, any_precision=any_precision):
            selected.append(cell)
    return selected


def _count_left_out(
    suite: type[CompatSuite],
    driver: type[Driver],
    own: Iterable[Cell],
    chosen: Collection[Cell],
    session: DistcompatSession,
) -> None:
    """Add a line to the summary if the profile leaves out cells of the suite's matrix.

    Args:
        suite: The suite.
        driver: Its driver.
        own: The cells of the suite's matrix.
        chosen: The cells of the profile.
        session: The session.
    """
    able = []
    for cell in own:
        if session.selects(cell) and not why_not_supported(driver, cell, session):
            able.append(cell)
    left_out = len(set(able) - set(chosen))
    if left_out:
        name = session.setting("profile").value
        words = f"of the {len(able)} cells of {suite.__name__}'s matrix that can run here"
        line = (
            f"profile {name} leaves out {left_out} {words} (--distcompat-profile default runs them)"
        )
        session.left_out[suite.__module__, suite.__qualname__] = line
        session.share(LEFT_OUT, [*session.left_out.values()])


def _checks_without_verdict(
    cell: Cell, driver: type[Driver], session: DistcompatSession
) -> dict[str, str]:
    """Return why checks have no verdict in a cell, by the name of the check."""
    reasons = {}
    for name, check in CHECKS.by_name.items():
        reason = why_not_checked(check, cell, driver, session)
        if reason:
            reasons[name] = reason
    return reasons


def _leave_out(
    profile: str,
    not_applicable: Mapping[Cell, dict[str, str]],
    unsupported: Mapping[Cell, str | None],
) -> None:
    """Add the checks that the profile leaves out to ``not_applicable``, each with the reason."""
    applicable = {}
    for cell, reasons in not_applicable.items():
        if not unsupported[cell]:
            applicable[cell] = [name for name in CHECKS.names() if name not in reasons]
    for (cell, check), reason in profiles.left_out(profile, applicable).items():
        not_applicable[cell][check] = reason


def _added_cases(
    suite: type[CompatSuite], driver: type[Driver], session: DistcompatSession
) -> list[Case]:
    """Return the cases that extensions add, in cells that the options select."""
    added_cases = []
    for by_extension in session.config.hook.pytest_distcompat_added_checks(
        suite=suite, session=session
    ):
        for added in by_extension:
            if session.selects(added.cell):
                unsupported = why_not_supported(driver, added.cell, session)
                added_cases.append(Case(suite, added.cell, added.check, unsupported=unsupported))
    return added_cases


@dataclass(frozen=True)
class NoCell:
    """The parameter of the only item of a suite without cells, which is skipped with the reason."""

    #: The id of the parameter.
    id: ClassVar[str] = "no-cell"

    reason: str


#: How many reasons a message gives why no cell of a suite can run.
REASONS = 2


def why_no_cell(suite: type[CompatSuite], session: DistcompatSession) -> str:
    """Return why no cell of the suite is selected, or why none of the selected cells can run."""
    drivers = session.setting("drivers")
    if drivers.value and suite.driver not in drivers.value:
        return f"--distcompat-drivers={drivers.text} leaves out driver {suite.driver!r}"
    cells = list(_all_cells(suite, session.world_size))
    selected = []
    for cell in cells:
        if session.selects(cell):
            selected.append(cell)
    if not selected:
        reasons = "; ".join(_excluding_options(cells, session))
        return f"no cell of {suite.__name__} is selected: {reasons or 'its matrix is empty'}"
    reasons = "; ".join(_commonest_reasons(selected, find_driver(suite.driver), session))
    return f"no cell of {suite.__name__} can run here: {reasons or 'the profile has none for it'}"


def _excluding_options(cells: Iterable[Cell], session: DistcompatSession) -> list[str]:
    """Return the options for strategies and precisions, each with those of the suite's cells."""
    strategies: dict[str, None] = {}
    precisions: dict[str, None] = {}
    for cell in cells:
        strategies[cell.strategy] = None
        precisions[cell.precision] = None
    reasons = []
    for name, names_of_cells in (("strategies", strategies), ("precisions", precisions)):
        setting = session.setting(name)
        if setting.value:
            reasons.append(f"{name} {setting.text!r} of {', '.join(names_of_cells) or 'none'}")
    return reasons


def _commonest_reasons(
    cells: Iterable[Cell], driver: type[Driver], session: DistcompatSession
) -> list[str]:
    """Return the most frequent reasons why cells cannot run here.

    A missing package comes before all other reasons, because the user can install it.
    """
    times: Counter[str] = Counter()
    for cell in cells:
        reason = why_not_supported(driver, cell, session)
        if reason:
            times[reason] += 1
    ordered = sorted(times, key=lambda reason: ("not installed" not in reason, -times[reason]))
    return ordered[:REASONS]


def parametrize(metafunc: pytest.Metafunc, session: DistcompatSession) -> None:
    """Run a suite's test once for each of its cases. Raises UsageProblem."""
    suite: Any = metafunc.cls
    selected = cases(suite, session)
    parameters: Sequence[Case | NoCell] = selected
    if selected:
        cells = [case.cell for case in selected]
        session.modules += preload_of(find_driver(suite.driver), cells)
    else:
        parameters = [NoCell(why_no_cell(suite, session))]
    ids = [parameter.id for parameter in parameters]
    metafunc.parametrize("distcompat_case", parameters, ids=ids, indirect=True)


# Why a case, a cell or a check has no verdict here.


def why_not_run(case: Case, session: DistcompatSession) -> str | None:
    """Return why the driver or the machine cannot run the case; None if they can."""
    if case.unsupported:
        return case.unsupported
    driver = find_driver(case.suite.driver)
    # The most ranks on one machine. All machines are assumed to have as many GPUs as this one.
    largest = 0
    for run in case.check.runs(case.cell, driver).runs:
        cell = run.cell(case.cell)
        largest = max(largest, cell.spread.local_size)
    return session.too_large(largest) or None


def why_not_supported(driver: type[Driver], cell: Cell, session: DistcompatSession) -> str | None:
    """Return why the driver or this session cannot run the cell; None if they can."""
    if session.uses_mig and STRATEGIES.get(cell.strategy).zero_stage is not None:
        return NO_MIG
    reason = cell.spread.uneven or unsupported_reason(driver, cell, session.device)
    if not reason and session.substitute is not None:
        reason = session.substitute.why_not_supported(driver, cell)
    if not reason and session.shares_through_gloo(cell.world_size):
        reason = why_not_through_gloo(cell)
    return reason or None


def why_not_checked(
    check: Check, cell: Cell, driver: type[Driver], session: DistcompatSession
) -> str | None:
    """Return why a check has no verdict in a cell; None if it has one."""
    if session.substitute is not None:
        reason = session.substitute.why_not_checked(check.name)
        if reason:
            return reason
    # A reason against the whole cell gives one skipped item, rather than one for each check.
    if session.shares_through_gloo(cell.world_size) and not why_not_through_gloo(cell):
        reason = why_not_through_gloo(cell, check.name)
        if reason:
            return reason
    return not_applicable(check, cell, driver, session.limits)


# The order of items, and which of them this machine runs.


def put_in_order(items: list[pytest.Item], session: DistcompatSession) -> None:
    """Sort the items of suites as the session's budget orders their cells.

    All other tests come first.
    """
    order = session.setting("budget").value.order(session.last_report)

    def position(item: pytest.Item) -> tuple[object, ...]:
        case = case_of(item)
        if case is None:
            return ()
        key: tuple[object, ...] = order(case.suite.driver, case.cell.id)
        return key

    items.sort(key=position)


def select_shard(session: DistcompatSession, shard: Shard, items: list[pytest.Item]) -> None:
    """Deselect the items of other shards, and write the shards into the session's store."""
    items_of_unit: dict[str, list[pytest.Item]] = {}
    sizes: dict[str, float] = {}
    for item in items:
        unit = _shard_unit(item)
        items_of_unit.setdefault(unit, []).append(item)
        sizes[unit] = sizes.get(unit, 0) + _shard_size(item)
    # By the baseline, not by the last report, because all machines must divide in the same way.
    plan = divide(sizes, session.setting("baseline").value, shard.count)
    can_run = []
    for units in plan:
        can_run.append(any(_any_can_run(items_of_unit[unit], session) for unit in units))
    session.share(SHARDS, {"number": shard.number, "plan": plan, "can_run": can_run})
    own_units = plan[shard.number - 1]
    own = []
    others = []
    for item in items:
        if _shard_unit(item) in own_units:
            own.append(item)
        else:
            others.append(item)
    if others:
        session.config.hook.pytest_deselected(items=others)
        items[:] = own


def _shard_unit(item: pytest.Item) -> str:
    """Return the name of the unit of an item that must stay in one shard.

    A unit is a cell of a suite, or a module of other tests. The checks in a cell share runs. The
    other tests of a module share fixtures, and perhaps ranks.
    """
    case = case_of(item)
    if case is None:
        return item.nodeid.partition("::")[0]
    return cell_name(item, case.cell)


def _shard_size(item: pytest.Item) -> float:
    """Return the expected duration of a test, relative to a check or a marked test."""
    if case_of(item) is not None or item.get_closest_marker("distcompat"):
        return 1
    return ORDINARY


def _any_can_run(items: Iterable[pytest.Item], session: DistcompatSession) -> bool:
    """Tell whether this machine can run a case among these items."""
    for item in items:
        case = case_of(item)
        if case is not None and not why_not_run(case, session):
            return True
    return False


# Running a case.


class BoundCase:
    """The value of the fixture ``distcompat_case``: a call runs the case and ends like it."""

    def __init__(self, case: Case, item: pytest.Function) -> None:
        self.case, self.item = case, item
        self._cost: dict[str, Any] = {}
        self._declaration: Expectation | None = None

    def __call__(self) -> None:
        """Run the case, and end as its verdict says.

        Raises:
            pytest.skip.Exception: For a case that is skipped or passed without ranks.
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
            The verdict, and the command that repeats the run that ended early, or else the last
            run.
        """
        case = self.case
        reason = why_not_run(case, session) or session.over_budget(case.suite.driver, case.cell)
        if reason:
            return skipped(case.check.name, case.cell, reason), ""
        session.runner.started.clear()
        verdict, trace = self._judge(session)
        name, failure = _quoted_run(trace, verdict.message)
        rank = None
        rank_that_raised = None
        if failure is not None:
            rank = failure.rank
            if failure.kind == "raised":
                rank_that_raised = rank
        command = _command_of(trace)
        session.note_failed_run(self.item, command, rank_that_raised)
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
        known = session.known_of(concerned(driver), session.nodeid_of(self.item))
        # The suite's own expectations come first.
        expected = list(case.suite.expect)
        for issue in known:
            expected += issue.expectations
        verdict, trace = run_check(
            session.runner, case.suite.driver, case.cell, case.check, expected
        )
        used = cost(trace, session.gpu_name)
        if used:
            self._cost = dataclasses.asdict(used)
        if verdict.status is Status.FAILED and not verdict.reason:
            self._declaration = declaration(case.check, case.cell, trace)
        verdict = self._verified(verdict, expected, session)
        declared_of(session).note_verdict(self.item, known, case.cell, verdict)
        return verdict, trace

    def _verified(
        self, verdict: Verdict, expected: Sequence[Expectation], session: DistcompatSession
    ) -> Verdict:
        """Run a sample of the checks again under cold torchrun (``--distcompat-verify``).

        Returns:
            The verdict; a failure if the second verdict differs from it.
        """
        case = self.case
        # A check with a limit measures a number, which differs from run to run. And cold torchrun
        # starts all ranks on this machine.
        if case.check.limit or not case.cell.spread.on_one:
            return verdict
        if not session.verifies(session.nodeid_of(self.item)):
            return verdict
        cold, _ = run_check(session.cold_runner, case.suite.driver, case.cell, case.check, expected)
        if cold.status == verdict.status:
            return verdict
        self._declaration = None
        message = disagreement(verdict.status, cold.status, cold.message or verdict.message)
        return dataclasses.replace(verdict, status=Status.FAILED, message=message)

    def _show_output(self, session: DistcompatSession, verdict: Verdict) -> None:
        """Store the output of the ranks for the report, or print it without capture (``-s``).

        A failed item shows the run that ended early, or else all runs that its check reads. Any
        other item shows only the runs that it has started, because checks share runs.
        """
        config = self.item.config
        if config.getoption("capture", "no") in {"no", "tee-sys"} and not hasattr(
            config, "workerinput"
        ):
            for title, content in sections(session.runner.started):
                print(f"\n{title}:\n{content}")  # noqa: T201 - it is what the ranks printed
        elif verdict.status.red:
            self.item.stash[OUTPUT] = sections(self._runs_of_failure(session, verdict))
        else:
            self.item.stash[OUTPUT] = sections(session.runner.started)

    def _runs_of_failure(self, session: DistcompatSession, verdict: Verdict) -> dict[Path, str]:
        """Return the run that ended early, or all runs that the check reads: directory to name."""
        case = self.case
        scenario = case.check.runs(case.cell, find_driver(case.suite.driver))
        runs = session.runner.directories(case.suite.driver, case.cell, scenario)
        if not verdict.ended_run:
            return runs
        return {directory: name for directory, name in runs.items() if name == verdict.ended_run}

    def _text(self, verdict: Verdict, command: str) -> str:
        """Return the text of a failure."""
        # The finding comes first, because summaries and JUnit show the first line only.
        lines = [verdict.message.rstrip(), "", f"{verdict.cell}: {verdict.check}: {verdict.status}"]
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
    commands = list(trace.notes.values())
    last = commands[-1] if commands else ""
    for run in trace:
        if run.end is not None:
            return trace.notes.get(run.name) or last
    return last


def _quoted_run(trace: Trace, message: str) -> tuple[str, RunFailure | None]:
    """Return name and end of the first run that ended early and whose message a verdict quotes.

    The name is empty if there is none, as if a check has failed.
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
        take_xfail_from_hard(report, error)


@dataclass(frozen=True)
class _Written:
    """Output of a rank.

    Attributes:
        kind: The stream, such as ``stdout``.
        run: The name of the run.
        text: The text.
    """

    kind: str
    run: str
    text: str


def sections(runs: Mapping[Path, str]) -> list[tuple[str, str]]:
    """Return report sections with the output of all ranks.

    Ranks with the same output share a section.

    Args:
        runs: The runs, directory to name.
    """
    ranks: dict[_Written, list[int]] = {}
    for directory, name in runs.items():
        for rank in range(_world_size_of_run(directory)):
            for kind, text in written(directory, rank):
                ranks.setdefault(_Written(kind, name, text), []).append(rank)
    shown = []
    for output, numbers in ranks.items():
        title = f"Captured {output.kind} of {output.run} ({name_ranks(numbers)})"
        shown.append((title, excerpt(output.text, SECTION_CHARACTERS)))
    return shown


def _world_size_of_run(directory: Path) -> int:
    """Return the number of ranks of a run.

    The result is 0 if it was not started because an earlier run failed.
    """
    request = directory / "request.json"
    if not request.exists():
        return 0
    return Request.read(request).world_size
