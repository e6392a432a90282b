"""``@pytest.mark.distcompat`` in the parent: the arguments of the mark, and one item run on all ranks."""

from __future__ import annotations

import dataclasses
import math
import os
import unittest
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from pytest_distcompat.cell import Cell, Matrix, OptionValue, uneven
from pytest_distcompat.plugin.debugging import FAILED_RUN, FailedRun
from pytest_distcompat.plugin.inside import rank_session
from pytest_distcompat.plugin.marked.outcome import UNCAPTURED, Outcome, RankFailure, disagreement, merge, unexcused
from pytest_distcompat.plugin.reporting.representation import represent
from pytest_distcompat.plugin.selection import case_of, strip_group
from pytest_distcompat.plugin.session import SESSION, DistcompatSession

if TYPE_CHECKING:
    from pytest_distcompat.launch.request import Request
    from pytest_distcompat.launch.reused_ranks import Reuse

MARK = "distcompat"
OUTCOME: pytest.StashKey[Outcome] = pytest.StashKey()
#: The time limit that pytest-timeout sets for the item, in seconds.
TIME_LIMIT: pytest.StashKey[float] = pytest.StashKey()
#: The item that pytest runs next.
NEXT_ITEM: pytest.StashKey[pytest.Item | None] = pytest.StashKey()
ARGUMENTS = ("world_size", "nodes", "strategies", "precisions", "options", "timeout", "reuse")
#: The failure of a test that passed although no rank ran it.
NOT_RUN = "no rank ran this test: somebody else's pytest_runtest_call, or pytest_runtest_protocol, took its call over"
#: Values of the argument ``reuse``: which tests share ranks.
REUSE = ("never", "module", "session")


@dataclass(frozen=True)
class Mark:
    """The checked arguments of ``@pytest.mark.distcompat(...)``."""

    world_size: int | None = None
    nodes: int | None = None
    strategies: tuple[str, ...] = ()
    precisions: tuple[str, ...] = ()
    options: tuple[Mapping[str, OptionValue], ...] = ()
    timeout: float | None = None
    reuse: str = ""

    @property
    def has_cells(self) -> bool:
        """Return whether the test runs once for each of several cells."""
        return bool(self.strategies or self.precisions or self.options)


def read_mark(mark: pytest.Mark) -> Mark:
    """Read and check the arguments of a mark.

    Raises:
        ValueError: An argument is wrong; the message says what is right.
    """
    if mark.args:
        raise ValueError(f"@pytest.mark.{MARK} takes keyword arguments only: {', '.join(ARGUMENTS)}")
    for name in mark.kwargs:
        if name not in ARGUMENTS:
            raise ValueError(f"@pytest.mark.{MARK} has no argument {name!r}. Known: {', '.join(ARGUMENTS)}")
    arguments = dict(mark.kwargs)
    for name in ("strategies", "precisions", "options"):
        arguments[name] = _read_list(name, arguments.get(name, ()))
    _check_numbers(arguments)
    if arguments.get("reuse", "never") not in REUSE:
        raise ValueError(f"@pytest.mark.{MARK}(reuse={arguments['reuse']!r}): known are {', '.join(REUSE)}")
    _check_cells(arguments)
    return Mark(**arguments)


def _read_list(name: str, value: Any) -> tuple[Any, ...]:
    """Return the list that an argument has; a text or a dict is none, though one can iterate over it."""
    if isinstance(value, (str, Mapping)) or not isinstance(value, Iterable):
        raise ValueError(f"@pytest.mark.{MARK}({name}=...) takes a list, got {value!r}")
    return tuple(value)


def _check_numbers(arguments: Mapping[str, Any]) -> None:
    """Check the numbers of ranks and nodes, and the time limit in seconds."""
    for name in ("world_size", "nodes"):
        count = arguments.get(name)
        if count is not None and (type(count) is not int or count < 1):
            raise ValueError(f"@pytest.mark.{MARK}({name}={count!r}): expected a whole number of at least 1")
    size = arguments.get("world_size")
    nodes = arguments.get("nodes")
    if size and nodes and size % nodes:
        raise ValueError(
            f"@pytest.mark.{MARK}(world_size={size}, nodes={nodes}): expected a world size that nodes divides"
        )
    timeout = arguments.get("timeout")
    if timeout is not None and not (isinstance(timeout, (int, float)) and timeout > 0):
        raise ValueError(f"@pytest.mark.{MARK}(timeout={timeout!r}): expected a number of seconds above 0")


def _check_cells(arguments: Mapping[str, Any]) -> None:
    """Check the names of strategies and precisions, and the options of cells."""
    from pytest_distcompat.precisions import PRECISIONS
    from pytest_distcompat.strategies import STRATEGIES

    for strategy in arguments["strategies"]:
        STRATEGIES.get(strategy)
    for precision in arguments["precisions"]:
        PRECISIONS.get(precision)
    for options in arguments["options"]:
        if not isinstance(options, Mapping):
            raise ValueError(
                f"@pytest.mark.{MARK}(options=...) takes a list of dicts like {{'compile': True}}, got {options!r}"
            )
        Matrix(options=(options,))


def parametrize(metafunc: pytest.Metafunc, mark: Mark, session: DistcompatSession) -> None:
    """Run the test once for each cell of its mark that the options select."""
    from pytest_distcompat.precisions import PRECISIONS
    from pytest_distcompat.strategies import STRATEGIES

    matrix = Matrix(mark.strategies, mark.precisions or ("fp32",), (), mark.options or ({},), nodes=mark.nodes)
    default = mark.world_size or session.world_size, int(session.setting("nodes").value)
    cells = list(filter(session.selects, matrix.cells(STRATEGIES.names(), PRECISIONS.names(), *default)))
    if "cell" not in metafunc.fixturenames:
        metafunc.fixturenames.append("cell")
    metafunc.parametrize("cell", cells, ids=[cell.id for cell in cells], indirect=True)


def check_items(items: Iterable[pytest.Item]) -> None:
    """Raise pytest.UsageError for a mark on something that cannot run on ranks, or with a wrong argument.

    The arguments of a mark that a parameter or a conftest added are checked only here.
    """
    for item in items:
        test_class = getattr(item, "cls", None)
        if not isinstance(item, pytest.Function) or (test_class and issubclass(test_class, unittest.TestCase)):
            raise pytest.UsageError(
                f"{item.nodeid}: @pytest.mark.{MARK} works on functions and on methods of plain classes, "
                f"not on {'unittest.TestCase methods' if test_class else type(item).__name__}"
            )
        try:
            mark = mark_of(item)
        except ValueError as problem:
            raise pytest.UsageError(f"{item.nodeid}: {problem}") from None
        # Where options leave none of its cells, pytest gives its one item the parameter without a value.
        if mark and mark.has_cells and "cell" not in getattr(getattr(item, "callspec", None), "params", ()):
            raise pytest.UsageError(
                f"{item.nodeid}: @pytest.mark.{MARK}: cells need the mark on the function, class or module"
            )
        fixture = _fixture_of_an_object(item)
        if fixture:
            raise pytest.UsageError(
                f"{item.nodeid}: fixture {fixture!r} is of an object in pytest.main(plugins=[...]), which ranks, processes of "
                "their own, do not have; define it in a conftest.py, or in a module named by -p"
            )


def _fixture_of_an_object(item: pytest.Function) -> str | None:
    """Return the name of a fixture of the item that an object in ``pytest.main(plugins=[...])`` defines; None without."""
    plugins = item.config.invocation_params.plugins or ()
    objects = {id(plugin) for plugin in plugins if not isinstance(plugin, (str, ModuleType))}
    if not objects:
        return None
    # pytest's public API lists no definitions of an item's fixtures; a test of private names watches it.
    for name, definitions in item._fixtureinfo.name2fixturedefs.items():  # noqa: SLF001
        if any(id(getattr(definition.func, "__self__", None)) in objects for definition in definitions):
            return name
    return None


def mark_of(item: pytest.Item) -> Mark | None:
    """Return the arguments of the item's mark; None for an ordinary test."""
    mark = item.get_closest_marker(MARK)
    return None if mark is None else read_mark(mark)


def cell_of(item: pytest.Item) -> Cell | None:
    """Return the cell of a parametrized item; None if it has none."""
    callspec: Any = getattr(item, "callspec", None)
    cell = callspec.params.get("cell") if callspec is not None else None
    return cell if isinstance(cell, Cell) else None


def world_size_of(item: pytest.Item, mark: Mark, session: DistcompatSession) -> int:
    """Return the number of ranks that the item runs on."""
    cell = cell_of(item)
    return cell.world_size if cell else mark.world_size or session.world_size


def nodes_of(item: pytest.Item, mark: Mark, session: DistcompatSession) -> int:
    """Return the number of nodes that the item's ranks are spread over: its own, else the session's."""
    return mark.nodes or int(session.setting("nodes").value)


def before(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Note the next item, and end ranks that are kept for others than this one, if the teardown before it did not."""
    item.stash[NEXT_ITEM] = nextitem
    session = item.config.stash[SESSION]
    problem = _retire(session, item)
    if problem:
        session.notice(f"ranks that were kept did not leave well: {problem}")


def take_over(item: pytest.Function) -> None:
    """Have the ranks run a marked test: in this process no fixture is set up, and its function is never called."""
    if item.config.stash[SESSION].simulated:
        pytest.skip("simulated: a marked test needs ranks")
    item.fixturenames = []
    _hide_text_conditions(item)
    if OUTCOME in item.stash:
        del item.stash[OUTCOME]

    def runtest() -> None:
        __tracebackhide__ = True
        run_on_ranks(item)

    if getattr(item.obj, "is_hypothesis_test", False):
        # Hypothesis reads the fixtures of the function before it calls it.
        item.obj = runtest
    vars(item)["runtest"] = runtest


def _hide_text_conditions(item: pytest.Function) -> None:
    """Hide marks with a text as their condition from pytest in this process: it may read variables of a rank.

    The ranks evaluate all marks.
    https://docs.pytest.org/en/stable/historical-notes.html#conditions-as-strings-instead-of-booleans
    """
    original = item.iter_markers_with_node

    def is_hidden(mark: pytest.Mark) -> bool:
        conditions = (mark.kwargs.get("condition"), *mark.args)
        return mark.name in {"skipif", "xfail"} and any(isinstance(condition, str) for condition in conditions)

    def iter_markers_with_node(name: str | None = None) -> Iterator[tuple[Any, pytest.Mark]]:
        return ((node, mark) for node, mark in original(name) if not is_hidden(mark))

    vars(item)["iter_markers_with_node"] = iter_markers_with_node


def run_on_ranks(item: pytest.Function) -> None:
    """Run the item on all ranks, and end as the worst of them did.

    Raises:
        RankFailure: The item failed. A skip and an xfail are raised as pytest does.
    """
    from pytest_distcompat.launch.request import ANY_MODULE, Request

    session, mark = item.config.stash[SESSION], mark_of(item)
    assert mark is not None
    world_size = world_size_of(item, mark, session)
    nodes = nodes_of(item, mark, session)
    problem = uneven(world_size, nodes)
    if problem and mark.nodes is None:
        problem += f" (--distcompat-nodes, {session.setting('nodes').origin}); nodes=1 in its mark runs them on one"
    problem = problem or session.too_large(world_size // nodes)
    if problem:
        pytest.skip(problem)
    keep, next_item = _keeping(item, mark, session)
    directory = session.new_directory(item.originalname)
    payload = rank_session.ItemPayload(
        nodeid=strip_group(item.config, item.nodeid),
        next=strip_group(item.config, next_item.nodeid) if next_item is not None else None,
        device=session.device,
        directory=str(directory),
        world_size=world_size,
        session=str(session.description_file),
        shared=str(directory) if nodes > 1 else "",
    )
    request = Request(
        target=rank_session.RUN,
        payload=dataclasses.asdict(payload),
        world_size=world_size,
        directory=str(directory),
        # Ranks that several modules share must suit each of them.
        collected=ANY_MODULE if keep is not None and keep.scope.startswith("session") else os.path.realpath(item.path),
        timeout=min(mark.timeout or session.timeout, item.stash.get(TIME_LIMIT, math.inf)),
        nodes=nodes,
    )
    ending = session.launcher.run(request, keep)
    outcome = merge(ending)
    # Cold torchrun starts all ranks on this machine.
    if nodes == 1 and session.verifies(strip_group(item.config, item.nodeid)):
        outcome = _verify(outcome, request, session, item)
    if item.config.getoption("capture", "no") in {"no", "tee-sys"} and not hasattr(item.config, "workerinput"):
        outcome = _print_uncaptured(outcome)
    item.stash[OUTCOME] = outcome
    if ending.notice:
        session.notice(ending.notice)
    item.user_properties.extend(outcome.properties)
    if ending.left:
        item.user_properties.append(("distcompat: ranks left", ending.left))
    if outcome.kind == "failed":
        raised = ending.cause is not None and ending.cause.status == "raised"
        item.stash[FAILED_RUN] = FailedRun(ending.command, ending.cause.rank if raised and ending.cause else None)
        lines = (outcome.text, f"reproduce: {session.reproduce(item)}", f"this run alone: {ending.command}")
        raise outcome.failure("\n".join(lines))
    if outcome.kind == "skipped":
        pytest.skip(outcome.text)
    if outcome.kind == "xfailed":
        pytest.xfail(outcome.text)


def _verify(outcome: Outcome, request: Request, session: DistcompatSession, item: pytest.Function) -> Outcome:
    """Run the item again under cold torchrun; return the same outcome, or a failure if the second one differs."""
    if session.reuse_scope:
        # Ranks that are kept hold the devices.
        session.launcher.retire()
    directory = str(session.new_directory(f"cold-{item.originalname}"))
    payload = {**request.payload, "directory": directory, "plain": True}
    cold = merge(session.cold_launcher.run(dataclasses.replace(request, directory=directory, payload=payload)))
    if (cold.kind, bool(cold.text)) == (outcome.kind, bool(outcome.text)):
        return outcome
    text = disagreement(outcome.kind, cold.kind, cold.text or outcome.text)
    return dataclasses.replace(outcome, kind="failed", text=text, hard=True, location=None)


def _keeping(item: pytest.Item, mark: Mark, session: DistcompatSession) -> tuple[Reuse | None, pytest.Item | None]:
    """Return how the item's ranks are kept, None if they are not; and the next item, if it shares them."""
    from pytest_distcompat.launch.reused_ranks import Reuse

    scope = scope_of(item, session)
    if scope is None:
        return None, None
    next_item = item.stash.get(NEXT_ITEM, None)
    if next_item is not None and scope_of(next_item, session) != scope:
        next_item = None
    return Reuse(scope, session.setting("reuse_limit").value, next_item is None), next_item


def scope_of(item: pytest.Item, session: DistcompatSession) -> str | None:
    """Return a key that all items have that share ranks with this one; None if it has ranks of its own."""
    mark = mark_of(item)
    reuse = mark and (mark.reuse or session.setting("reuse").value)
    if not mark or reuse == "never" or nodes_of(item, mark, session) > 1:
        return None
    module = item.nodeid.partition("::")[0] if reuse == "module" else ""
    return f"{reuse} {module} {world_size_of(item, mark, session)}"


def note_nodes(session: DistcompatSession, items: Iterable[pytest.Item]) -> None:
    """Note in the session over how many nodes a test of it is spread at most, and whether one needs a directory of all nodes."""
    for item in items:
        mark, case = mark_of(item), case_of(item)
        if mark is not None:
            size, nodes = world_size_of(item, mark, session), nodes_of(item, mark, session)
        elif case is not None:
            size, nodes = case.cell.world_size, case.cell.nodes
        else:
            continue
        if not uneven(size, nodes):
            session.nodes = max(session.nodes, nodes)
            # Runs of a suite go on from one another's files.
            apart = case is not None and case.cell.per_node and nodes > 1
            shares = case is not None or "shared_dir" in getattr(item, "fixturenames", ())
            session.shares |= shares and not apart and (nodes > 1 or session.worker_nodes > 0)


def after(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End ranks that are kept, unless the next item runs on them: they would hold devices for nothing.

    They tear down the fixtures that their tests shared, as pytest does after the last test that could have used them, even if
    that one was skipped. A rank that does not end well is an error of this item's teardown.
    """
    problem = _retire(item.config.stash[SESSION], nextitem)
    if problem:
        pytest.fail(f"ranks that tests shared did not leave well: {problem}", pytrace=False)


def _retire(session: DistcompatSession, next_item: pytest.Item | None) -> str:
    if session.reuse_scope and (next_item is None or session.reuse_scope != scope_of(next_item, session)):
        return session.launcher.retire()
    return ""


def _print_uncaptured(outcome: Outcome) -> Outcome:
    """Print the uncaptured output of the ranks, for pytest's -s; return the outcome without it."""
    captured = []
    for title, content in outcome.sections:
        if title.startswith(UNCAPTURED):
            print(f"\n{title}:\n{content}")  # noqa: T201 - it is what the ranks printed
        else:
            captured.append((title, content))
    return dataclasses.replace(outcome, sections=tuple(captured))


def finish_report(item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport) -> None:
    """Put the outcome of the ranks into the parent's report."""
    if report.when != "call":
        return
    outcome = item.stash.get(OUTCOME, None)
    if outcome is None:
        if report.passed:
            report.outcome, report.longrepr = "failed", NOT_RUN
        return
    if outcome.kind == "passed" and outcome.text and report.passed and not hasattr(report, "wasxfail"):
        report.outcome, report.longrepr = "failed", outcome.text
    report.sections.extend(outcome.sections)
    if call.excinfo is not None and isinstance(call.excinfo.value, RankFailure):
        represent(report, str(call.excinfo.value), outcome.location)
        # The ranks have applied their xfail marks to the exceptions themselves; here pytest applied the mark to RankFailure. A
        # report that another plugin turned into a pass, by running the test again, is left alone.
        if call.excinfo.value.hard or hasattr(report, "wasxfail"):
            unexcused(report)
    elif outcome.kind == "skipped" and outcome.location is not None:
        report.longrepr = outcome.location
