"""The parent's side of ``@pytest.mark.distcompat``: what the mark says, and one item run on all ranks."""

from __future__ import annotations

import dataclasses
import math
import os
import unittest
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from pytest_distcompat.cell import Cell, Matrix, OptionValue
from pytest_distcompat.plugin.marked.conditions import leave_to_ranks
from pytest_distcompat.plugin.marked.outcome import UNCAPTURED, Outcome, RankFailure, disagreement, merge, unexcused
from pytest_distcompat.plugin.nodeids import strip_group
from pytest_distcompat.plugin.reporting.representation import represent
from pytest_distcompat.plugin.session import SESSION, DistcompatSession

if TYPE_CHECKING:
    from pytest_distcompat.launch import Keeping, Request

MARK = "distcompat"
OUTCOME: pytest.StashKey[Outcome] = pytest.StashKey()
#: What pytest-timeout allows the item, in seconds.
TIME_LIMIT: pytest.StashKey[float] = pytest.StashKey()
#: The item that pytest runs next.
NEXT: pytest.StashKey[pytest.Item | None] = pytest.StashKey()
ARGUMENTS = ("world_size", "strategies", "precisions", "options", "timeout", "reuse")
#: What is said of a test that passed and of which no rank has heard.
UNRUN = "no rank ran this test: somebody else's pytest_runtest_call, or pytest_runtest_protocol, took its call over"
#: Which tests share ranks.
REUSE = ("never", "module", "session")


@dataclass(frozen=True)
class Mark:
    """What ``@pytest.mark.distcompat(...)`` says, read and checked."""

    world_size: int | None = None
    strategies: tuple[str, ...] = ()
    precisions: tuple[str, ...] = ()
    options: tuple[Mapping[str, OptionValue], ...] = ()
    timeout: float | None = None
    reuse: str = ""

    @property
    def has_cells(self) -> bool:
        """Whether the test is to run once for each cell."""
        return bool(self.strategies or self.precisions or self.options)


def read_mark(mark: pytest.Mark) -> Mark:
    """Raises ValueError, saying what is right, for a wrong argument."""
    from pytest_distcompat.precisions import PRECISIONS
    from pytest_distcompat.strategies import STRATEGIES

    if mark.args:
        raise ValueError(f"@pytest.mark.{MARK} takes keyword arguments only: {', '.join(ARGUMENTS)}")
    for name in mark.kwargs:
        if name not in ARGUMENTS:
            raise ValueError(f"@pytest.mark.{MARK} has no argument {name!r}. Known: {', '.join(ARGUMENTS)}")
    read = dict(mark.kwargs)
    for name in ("strategies", "precisions", "options"):
        if isinstance(read.get(name, ()), (str, Mapping)) or not isinstance(read.get(name, ()), Iterable):
            raise ValueError(f"@pytest.mark.{MARK}({name}=...) takes a list, got {read[name]!r}")
        read[name] = tuple(read.get(name, ()))
    world_size = read.get("world_size")
    if world_size is not None and (type(world_size) is not int or world_size < 1):
        raise ValueError(f"@pytest.mark.{MARK}(world_size={world_size!r}): expected a whole number of at least 1")
    timeout = read.get("timeout")
    if timeout is not None and not (isinstance(timeout, (int, float)) and timeout > 0):
        raise ValueError(f"@pytest.mark.{MARK}(timeout={timeout!r}): expected a number of seconds above 0")
    if read.get("reuse", "never") not in REUSE:
        raise ValueError(f"@pytest.mark.{MARK}(reuse={read['reuse']!r}): known are {', '.join(REUSE)}")
    for strategy in read["strategies"]:
        STRATEGIES.get(strategy)
    for precision in read["precisions"]:
        PRECISIONS.get(precision)
    for options in read["options"]:
        if not isinstance(options, Mapping):
            raise ValueError(
                f"@pytest.mark.{MARK}(options=...) takes a list of dicts like {{'compile': True}}, got {options!r}"
            )
        Matrix(options=(options,))
    return Mark(**read)


def parametrize(
    metafunc: pytest.Metafunc, mark: Mark, selected: tuple[Iterable[str], Iterable[str]], default: int
) -> None:
    """Run the test once for each cell of its mark; ``selected`` are the strategies and precisions of this run."""
    from pytest_distcompat.precisions import PRECISIONS
    from pytest_distcompat.strategies import STRATEGIES

    matrix = Matrix(mark.strategies, mark.precisions or ("fp32",), (), mark.options or ({},))
    only_strategies, only_precisions = tuple(selected[0]), tuple(selected[1])
    cells = [
        cell
        for cell in matrix.cells(STRATEGIES.names(), PRECISIONS.names(), mark.world_size or default)
        if (not only_strategies or cell.strategy in only_strategies)
        and (not only_precisions or cell.precision in only_precisions)
    ]
    if "cell" not in metafunc.fixturenames:
        metafunc.fixturenames.append("cell")
    metafunc.parametrize("cell", cells, ids=[cell.id for cell in cells], indirect=True)


def check_items(items: Iterable[pytest.Item]) -> None:
    """Raise pytest.UsageError for a mark on something that cannot run on ranks.

    And for what is wrong with one that came after the tests were made: by a parameter, or from a conftest.
    """
    for item in items:
        mark = item.get_closest_marker(MARK)
        if mark is None:
            continue
        test_class = getattr(item, "cls", None)
        if not isinstance(item, pytest.Function) or (test_class and issubclass(test_class, unittest.TestCase)):
            raise pytest.UsageError(
                f"{item.nodeid}: @pytest.mark.{MARK} works on functions and on methods of plain classes, "
                f"not on {'unittest.TestCase methods' if test_class else type(item).__name__}"
            )
        try:
            read = read_mark(mark)
        except ValueError as problem:
            raise pytest.UsageError(f"{item.nodeid}: {problem}") from None
        # Where options leave none of its cells, its one item has a parameter without value.
        if read.has_cells and "cell" not in getattr(getattr(item, "callspec", None), "params", ()):
            raise pytest.UsageError(
                f"{item.nodeid}: @pytest.mark.{MARK}: cells need the mark on the function, class or module"
            )


def mark_of(item: pytest.Item) -> Mark | None:
    """The item's mark, None for an ordinary test."""
    mark = item.get_closest_marker(MARK)
    return None if mark is None else read_mark(mark)


def cell_of(item: pytest.Item) -> Cell | None:
    """The cell that the item is parametrized over."""
    found: Any = getattr(item, "callspec", None)
    cell = found.params.get("cell") if found is not None else None
    return cell if isinstance(cell, Cell) else None


def world_size_of(item: pytest.Item, mark: Mark, session: DistcompatSession) -> int:
    """On how many ranks the item runs."""
    cell = cell_of(item)
    return cell.world_size if cell else mark.world_size or session.world_size


def take_over(item: pytest.Function) -> None:
    """Have the ranks run the item. Here no fixture is set up, and nobody else calls it, be it a hook or the item's own class."""
    item.fixturenames = []
    leave_to_ranks(item)
    if OUTCOME in item.stash:
        del item.stash[OUTCOME]

    def runtest() -> None:
        __tracebackhide__ = True
        mark = mark_of(item)
        assert mark is not None
        run_on_ranks(item, mark)

    if getattr(item.obj, "is_hypothesis_test", False):
        # Hypothesis asks for the fixtures of what is called, before it is.
        item.obj = runtest
    vars(item)["runtest"] = runtest


def run_on_ranks(item: pytest.Function, mark: Mark) -> None:
    """Run the real item on all ranks, and end here as the worst of them did."""
    from pytest_distcompat.launch import Request
    from pytest_distcompat.launch.request import ANY_MODULE
    from pytest_distcompat.plugin.inside import rank_session

    session = item.config.stash[SESSION]
    world_size = world_size_of(item, mark, session)
    problem = session.too_large(world_size)
    if problem:
        pytest.skip(problem)
    keep, following = _keeping(item, mark, session)
    directory = session.new_directory(item.originalname)
    request = Request(
        target=rank_session.RUN,
        payload={
            "nodeid": strip_group(item.config, item.nodeid),
            "next": strip_group(item.config, following.nodeid) if following is not None else None,
            "device": session.device,
            "directory": str(directory),
            "world_size": world_size,
            "session": str(session.described),
        },
        world_size=world_size,
        directory=str(directory),
        # Ranks that several modules share are to suit each of them.
        collected=ANY_MODULE if keep is not None and keep.scope.startswith("session") else os.path.realpath(item.path),
        timeout=min(mark.timeout or session.timeout, item.stash.get(TIME_LIMIT, math.inf)),
    )
    ending = session.launcher.run(request, keep)
    outcome = merge(ending)
    if session.verifies(strip_group(item.config, item.nodeid)):
        outcome = _verified(outcome, request, session, item)
    if item.config.getoption("capture", "no") in {"no", "tee-sys"} and not hasattr(item.config, "workerinput"):
        outcome = _printed(outcome)
    item.stash[OUTCOME] = outcome
    if ending.notice:
        session.notice(ending.notice)
    item.user_properties.extend(outcome.properties)
    if ending.left:
        item.user_properties.append(("distcompat: ranks left", ending.left))
    if outcome.kind == "failed":
        lines = (outcome.text, f"reproduce: {session.reproduce(item)}", f"this run alone: {ending.command}")
        raise RankFailure("\n".join(lines), hard=outcome.hard)
    if outcome.kind == "skipped":
        pytest.skip(outcome.text)
    if outcome.kind == "xfailed":
        pytest.xfail(outcome.text)


def _verified(outcome: Outcome, request: Request, session: DistcompatSession, item: pytest.Function) -> Outcome:
    """Run the item again under cold torchrun; return the same outcome, or a failure where that comes to another one."""
    if session.keeping:
        # They hold the devices.
        session.launcher.retire()
    directory = str(session.new_directory(f"cold-{item.originalname}"))
    payload = {**request.payload, "directory": directory}
    cold = merge(session.cold_launcher.run(dataclasses.replace(request, directory=directory, payload=payload)))
    if (cold.kind, bool(cold.text)) == (outcome.kind, bool(outcome.text)):
        return outcome
    text = disagreement(outcome.kind, cold.kind, cold.text or outcome.text)
    return dataclasses.replace(outcome, kind="failed", text=text, hard=True, location=None)


def _keeping(item: pytest.Item, mark: Mark, session: DistcompatSession) -> tuple[Keeping | None, pytest.Item | None]:
    """For whom the item's ranks are kept, None if for nobody; and the next item, if it is one of those."""
    from pytest_distcompat.launch import Keeping

    scope = scope_of(item, session)
    if scope is None:
        return None, None
    following = item.stash.get(NEXT, None)
    if following is not None and scope_of(following, session) != scope:
        following = None
    return Keeping(scope, session.setting("reuse_limit").value, following is None), following


def scope_of(item: pytest.Item, session: DistcompatSession) -> str | None:
    """What all items have in common that share ranks with this one; None if it has ranks of its own."""
    mark = mark_of(item)
    reuse = mark and (mark.reuse or session.setting("reuse").value)
    if not mark or reuse == "never":
        return None
    place = item.nodeid.partition("::")[0] if reuse == "module" else ""
    return f"{reuse} {place} {world_size_of(item, mark, session)}"


def retire_after(item: pytest.Item, following: pytest.Item | None) -> None:
    """Have ranks leave that were kept, but not for the item that comes next. They would hold devices for nothing.

    Fixtures that they share are torn down then, as pytest does after the last test that could have used them, be it skipped.
    Fails if that goes wrong.
    """
    problem = _retire(item.config.stash[SESSION], following)
    if problem:
        pytest.fail(f"ranks that tests shared did not leave well: {problem}", pytrace=False)


def retire_for(item: pytest.Item) -> None:
    """The same before an item, where the teardown of the one before it came to no such end; what goes wrong is a warning."""
    session = item.config.stash[SESSION]
    problem = _retire(session, item)
    if problem:
        session.notice(f"ranks that were kept did not leave well: {problem}")


def _retire(session: DistcompatSession, following: pytest.Item | None) -> str:
    if session.keeping and (following is None or session.keeping != scope_of(following, session)):
        return session.launcher.retire()
    return ""


def _printed(outcome: Outcome) -> Outcome:
    """Uncaptured output printed here, as pytest's -s asks; the rest of the outcome."""
    kept = []
    for title, content in outcome.sections:
        if title.startswith(UNCAPTURED):
            print(f"\n{title}:\n{content}")  # noqa: T201 - it is what the ranks printed
        else:
            kept.append((title, content))
    return dataclasses.replace(outcome, sections=tuple(kept))


def finish_report(item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport) -> None:
    """Put the ranks' own words into the parent's report."""
    if report.when != "call":
        return
    outcome = item.stash.get(OUTCOME, None)
    if outcome is None:
        if report.passed:
            report.outcome, report.longrepr = "failed", UNRUN
        return
    if outcome.kind == "passed" and outcome.text and report.passed and not hasattr(report, "wasxfail"):
        report.outcome, report.longrepr = "failed", outcome.text
    report.sections.extend(outcome.sections)
    if call.excinfo is not None and isinstance(call.excinfo.value, RankFailure):
        represent(report, str(call.excinfo.value), outcome.location)
        # The ranks have weighed their xfail marks, by the exceptions themselves: this one's mark knows only of ours. A report
        # that another plugin made a pass, by running the test again, is left alone.
        if call.excinfo.value.hard or hasattr(report, "wasxfail"):
            unexcused(report)
    elif outcome.kind == "skipped" and outcome.location is not None:
        report.longrepr = outcome.location
