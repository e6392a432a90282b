"""Items of a suite: validation of its class, its cases, and running one of them."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest

from pytest_distcompat import profiles
from pytest_distcompat.cell import Cell, Matrix
from pytest_distcompat.checks import CHECKS, OBSERVERS_WALK, WALK, Check
from pytest_distcompat.cost import cost
from pytest_distcompat.driver import Driver
from pytest_distcompat.drivers import DRIVERS, find_driver, preload_of, unsupported_reason
from pytest_distcompat.engine import not_applicable, run_check
from pytest_distcompat.excerpt import excerpt
from pytest_distcompat.expect import Expectation
from pytest_distcompat.failures import DistcompatError, Incompatible, LateFailure, RunFailedError, UsageProblem
from pytest_distcompat.judge import NO_VALUES, declaration, skipped
from pytest_distcompat.known import concerned
from pytest_distcompat.launch.ending import name_ranks
from pytest_distcompat.launch.files import written
from pytest_distcompat.launch.request import Request
from pytest_distcompat.plugin.debugging import FAILED_RUN, FailedRun
from pytest_distcompat.plugin.declared import declared_of, take_xfail_from_hard
from pytest_distcompat.plugin.marked.outcome import disagreement
from pytest_distcompat.plugin.marked.phase import SECTION_CHARACTERS
from pytest_distcompat.plugin.reporting.representation import represent
from pytest_distcompat.plugin.reporting.results import ATTRIBUTE
from pytest_distcompat.plugin.selection import case_of, cell_name, strip_group
from pytest_distcompat.plugin.session import LEFT_OUT, SESSION, DistcompatSession
from pytest_distcompat.plugin.shard import FILE as SHARDS
from pytest_distcompat.plugin.shard import ORDINARY, Shard, divide
from pytest_distcompat.plugin.suite.declared_names import check_names
from pytest_distcompat.plugin.suite.shared_gpu import why_not_through_gloo
from pytest_distcompat.precisions import PRECISIONS
from pytest_distcompat.status import Status, Verdict
from pytest_distcompat.strategies import STRATEGIES
from pytest_distcompat.suite import CompatSuite

VERDICT: pytest.StashKey[dict[str, Any]] = pytest.StashKey()
#: What the ranks of an item's runs wrote, as sections of its report.
OUTPUT: pytest.StashKey[list[tuple[str, str]]] = pytest.StashKey()


#: See docs/upstream/deepspeed_visible_uuid.py.
NO_MIG = "DeepSpeed reads CUDA_VISIBLE_DEVICES as numbers, and a MIG instance has none: it is named by its UUID"

#: The exception for a verdict that is a failure, by status; its message is the text to show.
FAILURES: Mapping[str, Callable[[str], DistcompatError]] = {
    Status.LATE: LateFailure,
    **dict.fromkeys((Status.CRASHED, Status.HUNG, Status.LEAKED), functools.partial(RunFailedError, hard=True)),
}


@dataclass(frozen=True)
class Case:
    """A case of a suite: one check in one cell."""

    suite: type[CompatSuite]
    cell: Cell
    check: Check
    #: Checks that have no item in the cell, with the reason.
    not_applicable: Mapping[str, str] = field(default_factory=dict, compare=False)
    #: Why the driver cannot run the cell; None if it can.
    unsupported: str | None = field(default=None, compare=False)

    @property
    def id(self) -> str:
        """The id of the item, like ``fsdp2-bf16_upcast-w2:names``."""
        return f"{self.cell.id}:{self.check.name}"


def is_base(suite: type[CompatSuite]) -> bool:
    """Tell whether a class is only there for suites to inherit: it has no driver, and there are classes below it."""
    return suite is CompatSuite or (not suite.driver and bool(suite.__subclasses__()))


def validate(suite: type[CompatSuite], world_size: int) -> None:
    """Raise UsageProblem for an override, an unknown name, or an expectation that covers no cell."""
    _check_overrides(suite)
    _check_kinds(suite)
    driver = find_driver(suite.driver)
    for expectation in suite.expect:
        if not isinstance(expectation, Expectation):
            raise UsageProblem(f"{suite.__name__}.expect holds {expectation!r}; expected fails(...) or refuses(...)")
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
            raise UsageProblem(f"{suite.__name__}.{name} is {getattr(suite, name)!r}; expected a {kind.__name__}")
    if not suite.driver:
        raise UsageProblem(
            f"{suite.__name__} has no driver (driver = {suite.driver!r}): expected module:attribute, or one of "
            f"{', '.join(DRIVERS.names())}"
        )


def _covers_any(suite: type[CompatSuite], expectation: Expectation, cells: Iterable[Cell]) -> bool:
    """Tell whether an expectation covers a check in any of these cells.

    An option sets the world size and the nodes of a suite that has none, and an expectation for another size covers cells of
    another session.
    """
    ignored = set()
    if not suite.matrix.world_sizes:
        ignored.add("world_size")
    if not suite.matrix.nodes:
        ignored.add("nodes")
    facets = tuple((name, wanted) for name, wanted in expectation.facets if name not in ignored)
    applicable = dataclasses.replace(expectation, facets=facets)
    for cell in cells:
        if any(applicable.covers(cell, check) for check in CHECKS.names()):
            return True
    return False


def _all_cells(suite: type[CompatSuite], world_size: int) -> Iterator[Cell]:
    return suite.matrix.cells(STRATEGIES.names(), PRECISIONS.names(), world_size)


def cases(suite: type[CompatSuite], session: DistcompatSession) -> list[Case]:
    """Return the cases of a suite in this session: the cells of the profile that the options select, with their checks.

    A cell that cannot run is one case, whose skip gives the reason.
    """
    drivers = session.setting("drivers").value
    if drivers and suite.driver not in drivers:
        return []
    driver, profile = find_driver(suite.driver), session.setting("profile").value
    names = (STRATEGIES.names(), PRECISIONS.names())
    here: dict[str, Any] = {"world_size": session.world_size, "device": session.device}
    shared = session.store if profile == "sweep" else None
    matrix = dataclasses.replace(suite.matrix, nodes=suite.matrix.nodes or int(session.setting("nodes").value))
    cells = profiles.cells(profile, matrix, driver=driver, names=names, shared=shared, **here)
    if profile != "default":
        cells = list(dict.fromkeys(cell.over(matrix.nodes or 1) for cell in cells))
    if session.simulated:
        cells = profiles.resized(cells, session.simulated)
    if suite.__module__ != CompatSuite.__module__ and not session.simulated:
        _count_left_out(suite, driver, matrix.cells(*names, session.world_size), cells, session)
    walks = profile == "walk" and not session.simulated
    cells = [cell for cell in cells if session.selects(cell, any_precision=walks)]
    if walks:
        return [Case(suite, cell, WALK, unsupported=why_not_supported(driver, cell, session)) for cell in cells]
    reasons_by_cell = {
        cell: {
            name: reason
            for name, check in CHECKS.by_name.items()
            if (reason := why_not_checked(check, cell, driver, session))
        }
        for cell in cells
    }
    unsupported = {cell: why_not_supported(driver, cell, session) for cell in reasons_by_cell}
    applicable = {
        cell: [name for name in CHECKS.names() if name not in reasons]
        for cell, reasons in reasons_by_cell.items()
        if not unsupported[cell]
    }
    for (cell, check), reason in profiles.left_out(profile, applicable).items():
        reasons_by_cell[cell][check] = reason
    found: list[Case] = []
    for cell, reasons in reasons_by_cell.items():
        checks = [check for check in CHECKS.by_name.values() if check.name not in reasons]
        reason = unsupported[cell]
        found += [Case(suite, cell, check, reasons, reason) for check in (checks[:1] if reason else checks)]
    # On GPUs it was not tried.
    walked = suite.__module__ == CompatSuite.__module__ and session.device == "cpu" and not session.simulated
    if profile == "default" and walked:
        cell = Cell.of(profiles.OBSERVED[driver.name], "fp32", session.world_size, model="mlp")
        if session.selects(cell):
            found.append(Case(suite, cell, OBSERVERS_WALK, unsupported=why_not_supported(driver, cell, session)))
    return found


def _count_left_out(
    suite: type[CompatSuite],
    driver: type[Driver],
    own: Iterable[Cell],
    chosen: Collection[Cell],
    session: DistcompatSession,
) -> None:
    """Note for the summary how many cells of the suite's own matrix, of those that can run here, the profile leaves out."""
    able = [cell for cell in own if session.selects(cell) and not why_not_supported(driver, cell, session)]
    left_out = len({*able} - {*chosen})
    if left_out:
        name = session.setting("profile").value
        words = f"of the {len(able)} cells of {suite.__name__}'s matrix that can run here"
        line = f"profile {name} leaves out {left_out} {words} (--distcompat-profile default runs them)"
        session.left_out[suite.__module__, suite.__qualname__] = line
        session.share(LEFT_OUT, [*session.left_out.values()])


@dataclass(frozen=True)
class NoCell:
    """The one parameter of a suite none of whose cells are selected; its item is skipped with the reason."""

    #: The id of the parameter.
    id: ClassVar[str] = "no-cell"

    reason: str


#: How many reasons are given why no cell of a suite can run.
REASONS = 2


def why_no_cell(suite: type[CompatSuite], session: DistcompatSession) -> str:
    """Return why the options select no cell of the suite, and what its matrix has."""
    if session.setting("drivers").value and suite.driver not in session.setting("drivers").value:
        return f"--distcompat-drivers={session.setting('drivers').text} leaves out driver {suite.driver!r}"
    cells = list(_all_cells(suite, session.world_size))
    axes = {"strategies": [cell.strategy for cell in cells], "precisions": [cell.precision for cell in cells]}
    reasons = [
        f"{name} {session.setting(name).text!r} of {', '.join(dict.fromkeys(there)) or 'none'}"
        for name, there in axes.items()
        if session.setting(name).value
    ]
    selected = [cell for cell in cells if session.selects(cell)]
    if not selected:
        return f"no cell of {suite.__name__} is selected: {'; '.join(reasons) or 'its matrix is empty'}"
    driver = find_driver(suite.driver)
    against = Counter(filter(None, (why_not_supported(driver, cell, session) for cell in selected)))
    # A package that is missing says the most: the same cells could run with it.
    ordered = sorted(against, key=lambda reason: ("not installed" not in reason, -against[reason]))
    return f"no cell of {suite.__name__} can run here: {'; '.join(ordered[:REASONS]) or 'the profile has none for it'}"


def parametrize(metafunc: pytest.Metafunc, session: DistcompatSession) -> None:
    """Run a suite's test once for each of its cases. Raises UsageProblem."""
    suite: Any = metafunc.cls
    selected = cases(suite, session)
    found: list[Case | NoCell] = [*selected] or [NoCell(why_no_cell(suite, session))]
    if selected:
        session.modules += preload_of(find_driver(suite.driver), (case.cell for case in selected))
    metafunc.parametrize("distcompat_case", found, ids=[case.id for case in found], indirect=True)


def why_not_run(case: Case, session: DistcompatSession) -> str | None:
    """Return why the driver or the machine cannot run the case; None if nothing stands against it."""
    driver = find_driver(case.suite.driver)
    cells = (run.cell(case.cell) for run in case.check.runs(case.cell, driver).runs)
    # Those of one node, as far as all nodes have as many GPUs as this one.
    largest = max(-(-cell.world_size // cell.nodes) for cell in cells)
    return case.unsupported or session.too_large(largest) or None


def why_not_supported(driver: type[Driver], cell: Cell, session: DistcompatSession) -> str | None:
    """Return why the driver cannot run the cell, or why the cell cannot be simulated; None if nothing stands against it."""
    simulated = session.simulated and profiles.not_simulated(driver, cell)
    gloo = why_not_through_gloo(cell) if session.shares_through_gloo(cell.world_size) else None
    if session.uses_mig and STRATEGIES.get(cell.strategy).zero_stage is not None:
        return NO_MIG
    return cell.uneven or unsupported_reason(driver, cell, session.device) or simulated or gloo or None


def why_not_checked(check: Check, cell: Cell, driver: type[Driver], session: DistcompatSession) -> str | None:
    """Return why a check has no verdict in a cell; None if it has one."""
    if session.simulated and check.name not in profiles.OF_SIMULATIONS:
        return NO_VALUES
    gloo = why_not_through_gloo(cell, check.name) if session.shares_through_gloo(cell.world_size) else None
    # A reason against the whole cell is one item, not one for each check.
    if gloo and not why_not_through_gloo(cell):
        return gloo
    return not_applicable(check, cell, driver, session.limits)


def put_in_order(items: list[pytest.Item], session: DistcompatSession) -> None:
    """Sort the items of suites by the order of the session's budget, after all others."""
    order = session.setting("budget").value.order(session.last_report)
    items.sort(key=lambda item: order(case.suite.driver, case.cell.id) if (case := case_of(item)) else ())


def select_shard(session: DistcompatSession, shard: Shard, items: list[pytest.Item]) -> None:
    """Deselect the items of other shards, and write the division into the store."""
    units: dict[str, list[pytest.Item]] = {}
    for item in items:
        # The checks of a suite's cell share runs; the other tests of a module share fixtures, and perhaps ranks.
        case = case_of(item)
        unit = cell_name(item, case.cell) if case else item.nodeid.partition("::")[0]
        units.setdefault(unit, []).append(item)

    def size(item: pytest.Item) -> float:
        return 1 if case_of(item) or item.get_closest_marker("distcompat") else ORDINARY

    sizes = {unit: sum(map(size, found)) for unit, found in units.items()}
    # Not the report that this session replaces: each machine may have another one.
    plan = divide(sizes, session.setting("baseline").value, shard.count)
    cases = [[case for unit in part for case in map(case_of, units[unit]) if case] for part in plan]
    can_run = [any(not why_not_run(case, session) for case in found) for found in cases]
    session.share(SHARDS, {"number": shard.number, "plan": plan, "can_run": can_run})
    own = {item for unit in plan[shard.number - 1] for item in units[unit]}
    others = [item for item in items if item not in own]
    if others:
        session.config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item in own]


class BoundCase:
    """The value of the fixture ``distcompat_case``: calling it runs the case, and ends as its verdict says."""

    def __init__(self, case: Case, item: pytest.Function) -> None:
        self.case, self.item = case, item
        self._cost: dict[str, Any] = {}
        self._declaration: Expectation | None = None

    def __call__(self) -> None:
        """Run the case; return if its verdict is a success, or skip, or xfail. Any other verdict is raised, see FAILURES."""
        __tracebackhide__ = True
        verdict, command = self._verdict()
        verdict = dataclasses.replace(
            verdict,
            suite=self.case.suite.__name__,
            driver=self.case.suite.driver,
            nodeid=strip_group(self.item.config, self.item.nodeid),
            reproduce=self.item.config.stash[SESSION].reproduce(self.item),
        )
        of_cell = {"not_applicable": dict(self.case.not_applicable), "cost": self._cost}
        self.item.stash[VERDICT] = {"verdict": verdict.to_json(), **of_cell}
        if verdict.status in {Status.SKIPPED, Status.SIMULATED}:
            pytest.skip(verdict.reason)
        if verdict.status is Status.KNOWN:
            # Without a traceback, whose source pytest would parse: what ``pytest.xfail`` raises.
            raise pytest.xfail.Exception(verdict.reason, pytrace=False)
        if not verdict.ok:
            raise FAILURES.get(verdict.status, Incompatible)(self._text(verdict, command))

    def _verdict(self) -> tuple[Verdict, str]:
        case = self.case
        session = self.item.config.stash[SESSION]
        driver = find_driver(case.suite.driver)
        scenario = case.check.runs(case.cell, driver)
        reason = why_not_run(case, session) or session.over_budget(case.suite.driver, case.cell)
        if reason:
            return skipped(case.check.name, case.cell, reason), ""
        # The suite's own expectations come first.
        session.runner.started.clear()
        known = session.known_of(concerned(driver), strip_group(self.item.config, self.item.nodeid))
        expected = (*case.suite.expect, *(expectation for issue in known for expectation in issue.expectations))
        verdict, trace = run_check(session.runner, case.suite.driver, case.cell, case.check, expected)
        found = cost(trace, session.gpu_name)
        self._cost = dataclasses.asdict(found) if found else {}
        if verdict.status is Status.FAILED and not verdict.reason:
            self._declaration = declaration(case.check, case.cell, trace)
        # A check with a limit measures a number, which differs from run to run.
        # Cold torchrun starts all ranks on this machine.
        verified = not case.check.limit and case.cell.nodes == 1
        if verified and session.verifies(strip_group(self.item.config, self.item.nodeid)):
            cold, _ = run_check(session.cold_runner, case.suite.driver, case.cell, case.check, expected)
            if cold.status != verdict.status:
                message = disagreement(verdict.status, cold.status, cold.message or verdict.message)
                verdict = dataclasses.replace(verdict, status=Status.FAILED, message=message)
                self._declaration = None
        declared_of(session).note_verdict(self.item, known, case.cell, verdict)
        broken = next((run.name for run in trace if run.end is not None), "")
        command = trace.notes.get(broken) or next(reversed(list(trace.notes.values())), "")
        # The first rank that failed in a run that the verdict quotes. The message of a check names ranks itself.
        ends = ((run.name, run.end) for run in trace if run.end is not None)
        name, ended = next(((n, one) for n, one in ends if one.message and one.message in verdict.message), ("", None))
        verdict = dataclasses.replace(verdict, ended_run=name, rank=ended.rank if ended else None)
        self.item.stash[FAILED_RUN] = FailedRun(command, ended.rank if ended and ended.kind == "raised" else None)
        verdict = dataclasses.replace(verdict, message=trace.name_nodes(verdict.message))
        self._show_output(session, session.runner.directories(case.suite.driver, case.cell, scenario), verdict)
        return verdict, command

    def _show_output(self, session: DistcompatSession, runs: Mapping[Path, str], verdict: Verdict) -> None:
        """Keep what the ranks wrote for the report, or print it (``-s``).

        An item that failed shows the run that ended early, else all its runs; any other those that it has started: checks share
        runs.
        """
        config, started = self.item.config, session.runner.started
        if config.getoption("capture", "no") in {"no", "tee-sys"} and not hasattr(config, "workerinput"):
            for title, content in sections(started):
                print(f"\n{title}:\n{content}")  # noqa: T201 - it is what the ranks printed
            return
        if verdict.status.red:
            runs = {directory: name for directory, name in runs.items() if verdict.ended_run in {"", name}}
        self.item.stash[OUTPUT] = sections(runs if verdict.status.red else started)

    def _text(self, verdict: Verdict, command: str) -> str:
        # The finding first: summaries and JUnit show the first line, beside the item's name.
        lines = [verdict.message.rstrip(), "", f"{verdict.cell}: {verdict.check}: {verdict.status}"]
        if verdict.status is Status.FAILED and not verdict.ended_run:
            # For a run that ended early the message has the cause already.
            lines += [f"the claim: {self.case.check.text}", ""]
        if self._declaration is not None:
            lines.append(f"if that is known, declare it in expect: {self._declaration},")
        lines.append(f"reproduce: {verdict.reproduce}")
        if command:
            lines.append(f"this run alone: {command}")
        return "\n".join(lines)


def finish_report(item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport) -> None:
    """Attach the verdict to the report, which then shows its message without frames of this plugin."""
    setattr(report, ATTRIBUTE, item.stash.get(VERDICT, None))
    output = item.stash.get(OUTPUT, None)
    report.sections.extend(output or ())
    if call.excinfo is not None and isinstance(call.excinfo.value, DistcompatError):
        represent(report, str(call.excinfo.value))
        take_xfail_from_hard(report, call.excinfo.value)


def sections(runs: Mapping[Path, str]) -> list[tuple[str, str]]:
    """Return a section for what each rank of these runs (directory to name) wrote; ranks that wrote the same share one."""
    ranks: dict[tuple[str, str, str], list[int]] = {}
    for directory, name in runs.items():
        request = directory / "request.json"
        # A run that follows one which failed never began.
        for rank in range(Request.read(request).world_size if request.exists() else 0):
            for kind, text in written(directory, rank):
                ranks.setdefault((kind, name, text), []).append(rank)
    return [
        (f"Captured {kind} of {name} ({name_ranks(numbers)})", excerpt(text, SECTION_CHARACTERS))
        for (kind, name, text), numbers in ranks.items()
    ]
