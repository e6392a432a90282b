"""The mark ``@pytest.mark.distcompat(...)``: reading and checking it, and its cells.

A test with this mark runs on *ranks*, the processes of one torchrun process group::

    @pytest.mark.distcompat(world_size=2)  # once, on 2 ranks
    @pytest.mark.distcompat(strategies=["ddp", "fsdp2"], precisions=["fp32"])  # once in each cell

A *cell* is a configuration: strategy, precision, number of ranks and options, as ``fsdp2-fp32-w2``.
The test gets its cell as the fixture ``cell``.

This is the first of the three steps ``declare``, ``run``, ``outcome``. Hooks of the plugin call it
during collection: ``parametrize`` makes an item for each cell, ``check_items`` finds wrong marks.
Later ``run`` reads the mark of an item again, by ``mark_of`` and ``spread_of``.
"""

from __future__ import annotations

import unittest
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest

from pytest_distcompat.cell import Cell, Matrix, OptionValue
from pytest_distcompat.plugin.marked.arguments import AddedArgument, added_arguments
from pytest_distcompat.plugin.session import DistcompatSession
from pytest_distcompat.spread import COUNTS, Spread

#: The name of the mark.
MARK = "distcompat"
#: The arguments of the mark that the core knows: ``world_size``, ``nodes`` and so on.
ARGUMENTS = (*COUNTS, "strategies", "precisions", "options", "timeout")


@dataclass(frozen=True)
class Mark:
    """The checked arguments of ``@pytest.mark.distcompat(...)``.

    Attributes:
        world_size: The number of ranks; None for the session's default.
        nodes: The number of machines over which the ranks are spread; None for the session's.
        strategies: The strategies of the cells, as ``("ddp", "fsdp2")``; empty if it names none.
        precisions: The precisions of the cells; empty if it names none.
        options: The options of the cells, as ``({"compile": True},)``; empty if it names none.
        timeout: The time limit in seconds; None for the session's.
        added: The arguments that extensions have added and the mark has: name to value.
    """

    world_size: int | None = None
    nodes: int | None = None
    strategies: tuple[str, ...] = ()
    precisions: tuple[str, ...] = ()
    options: tuple[Mapping[str, OptionValue], ...] = ()
    timeout: float | None = None
    added: Mapping[str, str] = field(default_factory=dict)

    @property
    def has_cells(self) -> bool:
        """Tell whether the test runs once for each of several cells, and not once without one."""
        return bool(self.strategies or self.precisions or self.options)


# Reading the arguments.


def read_mark(mark: pytest.Mark, added: Iterable[AddedArgument]) -> Mark:
    """Read and check the arguments of a mark.

    Args:
        mark: pytest's mark, with the arguments as the user wrote them.
        added: The arguments that extensions add, as ``reuse``.

    Raises:
        ValueError: An argument is wrong; the message says what is right.
    """
    added_by_name = {argument.name: argument for argument in added}
    known = ", ".join((*ARGUMENTS, *added_by_name))
    if mark.args:
        raise ValueError(f"@pytest.mark.{MARK} takes keyword arguments only: {known}")
    arguments: dict[str, Any] = {}
    values_of_added: dict[str, str] = {}
    for name, value in mark.kwargs.items():
        if name in ARGUMENTS:
            arguments[name] = value
        elif name in added_by_name:
            values_of_added[name] = value
        else:
            raise ValueError(f"@pytest.mark.{MARK} has no argument {name!r}. Known: {known}")
    for name in ("strategies", "precisions", "options"):
        arguments[name] = _read_list(name, arguments.get(name, ()))
    for name in COUNTS:
        _check_count(name, arguments.get(name))
    _check_timeout(arguments.get("timeout"))
    for name, value in values_of_added.items():
        _check_word(added_by_name[name], value)
    _check_cells(arguments)
    checked = Mark(**arguments, added=values_of_added)
    _check_even(checked)
    return checked


def _read_list(name: str, value: Any) -> tuple[Any, ...]:
    """Return the value of an argument that takes a list.

    A text or a dict, which could be iterated too, is an error: it is a forgotten pair of brackets.
    """
    if isinstance(value, (str, Mapping)) or not isinstance(value, Iterable):
        raise ValueError(f"@pytest.mark.{MARK}({name}=...) takes a list, got {value!r}")
    return tuple(value)


def _check_count(name: str, count: Any) -> None:
    """Check a number of ranks or machines; ``True``, an ``int`` in Python, is wrong."""
    if count is None:
        return
    if type(count) is not int or count < 1:
        raise ValueError(
            f"@pytest.mark.{MARK}({name}={count!r}): expected a whole number of at least 1"
        )


def _check_even(mark: Mark) -> None:
    """Check that all machines get the same number of ranks, if the mark names both numbers."""
    if mark.world_size and mark.nodes and Spread(mark.world_size, mark.nodes).uneven:
        numbers = ", ".join([f"{name}={getattr(mark, name)}" for name in COUNTS])
        raise ValueError(
            f"@pytest.mark.{MARK}({numbers}): expected a world size that nodes divides"
        )


def _check_timeout(seconds: Any) -> None:
    """Check a time limit. NaN is wrong too: it is not above 0."""
    if seconds is None:
        return
    if not isinstance(seconds, (int, float)) or not seconds > 0:
        raise ValueError(
            f"@pytest.mark.{MARK}(timeout={seconds!r}): expected a number of seconds above 0"
        )


def _check_word(argument: AddedArgument, value: Any) -> None:
    """Check the value of an extension's argument, which must be one of a few words."""
    if value in argument.known:
        return
    given = f"{argument.name}={value!r}"
    known = ", ".join(argument.known)
    raise ValueError(f"@pytest.mark.{MARK}({given}): known are {known}")


def _check_cells(arguments: Mapping[str, Any]) -> None:
    """Check the names of strategies and precisions, and the options of cells."""
    from pytest_distcompat.precisions import PRECISIONS
    from pytest_distcompat.strategies import STRATEGIES

    # Each ``get`` raises UsageProblem, a ValueError, for a name that does not exist.
    for strategy in arguments["strategies"]:
        STRATEGIES.get(strategy)
    for precision in arguments["precisions"]:
        PRECISIONS.get(precision)
    for options in arguments["options"]:
        if not isinstance(options, Mapping):
            raise ValueError(
                f"@pytest.mark.{MARK}(options=...) takes a list of dicts "
                f"like {{'compile': True}}, got {options!r}"
            )
        # Its constructor checks the names and values of options.
        Matrix(options=(options,))


# What the mark of an item says.


def mark_of(item: pytest.Item) -> Mark | None:
    """Return the arguments of the item's mark; None for an ordinary test.

    Raises:
        ValueError: The mark is wrong, see ``read_mark``.
    """
    mark = item.get_closest_marker(MARK)
    return None if mark is None else read_mark(mark, added_arguments(item.config))


def cell_of(item: pytest.Item) -> Cell | None:
    """Return the cell of a parametrized item; None if it has none."""
    callspec: Any = getattr(item, "callspec", None)
    if callspec is None:
        return None
    cell = callspec.params.get("cell")
    return cell if isinstance(cell, Cell) else None


def world_size_of(item: pytest.Item, mark: Mark, session: DistcompatSession) -> int:
    """Return the number of ranks that the item runs on: its cell's, the mark's or the session's."""
    cell = cell_of(item)
    if cell is not None:
        return cell.world_size
    return mark.world_size or session.world_size


def spread_of(item: pytest.Item, mark: Mark, session: DistcompatSession) -> Spread:
    """Return the number of ranks of a test, and of the machines over which they are spread."""
    return session.placement.spread(world_size_of(item, mark, session), mark.nodes)


def parametrize(metafunc: pytest.Metafunc, mark: Mark, session: DistcompatSession) -> None:
    """Run the test once for each cell of its mark that the session's options select.

    If the mark names no precision, the cells are in fp32; if it names no options, they have none.
    """
    from pytest_distcompat.precisions import PRECISIONS
    from pytest_distcompat.strategies import STRATEGIES

    matrix = Matrix(
        strategies=mark.strategies,
        precisions=mark.precisions or ("fp32",),
        options=mark.options or ({},),
        nodes=mark.nodes,
    )
    matrix = session.placement.spread_matrix(matrix)
    world_size = mark.world_size or session.world_size
    cells = []
    for cell in matrix.cells(STRATEGIES.names(), PRECISIONS.names(), world_size):
        if session.selects(cell):
            cells.append(cell)
    # pytest can only parametrize a fixture that the test uses. This one need not.
    if "cell" not in metafunc.fixturenames:
        metafunc.fixturenames.append("cell")
    # Indirect: the value goes to the fixture ``cell``, which returns it.
    metafunc.parametrize("cell", cells, ids=[cell.id for cell in cells], indirect=True)


# Whether an item can run on ranks.


def check_items(items: Iterable[pytest.Item]) -> None:
    """Raise pytest.UsageError for a wrong mark, or one on an item that cannot run on ranks.

    Most marks were checked when the test was parametrized. A mark that a parameter
    (``pytest.param(..., marks=...)``) or a conftest added is checked only here.
    """
    for item in items:
        reason = _why_not_on_ranks(item)
        if reason:
            raise pytest.UsageError(f"{item.nodeid}: {reason}")


def _why_not_on_ranks(item: pytest.Item) -> str | None:
    """Return why the item cannot run on ranks; None if it can."""
    test_class = getattr(item, "cls", None)
    is_unittest = test_class is not None and issubclass(test_class, unittest.TestCase)
    if is_unittest or not isinstance(item, pytest.Function):
        kind = "unittest.TestCase methods" if test_class else type(item).__name__
        return (
            f"@pytest.mark.{MARK} works on functions and on methods of plain classes, not on {kind}"
        )
    try:
        mark = mark_of(item)
    except ValueError as problem:
        return str(problem)
    # If options select none of its cells, pytest still gives the one item a parameter ``cell``,
    # without a value.
    if mark is not None and mark.has_cells and not _has_parameter_cell(item):
        return f"@pytest.mark.{MARK}: cells need the mark on the function, class or module"
    fixture = _fixture_of_an_object(item)
    if fixture is not None:
        return (
            f"fixture {fixture!r} is of an object in pytest.main(plugins=[...]), "
            "which ranks, processes of their own, do not have; "
            "define it in a conftest.py, or in a module named by -p"
        )
    return None


def _has_parameter_cell(item: pytest.Item) -> bool:
    """Tell whether pytest has parametrized the item by cells."""
    callspec: Any = getattr(item, "callspec", None)
    return "cell" in getattr(callspec, "params", ())


def _fixture_of_an_object(item: pytest.Function) -> str | None:
    """Return a fixture of the item that an object in ``pytest.main(plugins=[...])`` defines.

    None if there is no such fixture. Modules and names of modules are no such objects: ranks can
    import them.
    """
    objects = set()
    for plugin in item.config.invocation_params.plugins or ():
        if not isinstance(plugin, (str, ModuleType)):
            objects.add(id(plugin))
    if not objects:
        return None
    # pytest's public API lists no definitions of an item's fixtures; a test of private names
    # watches it.
    for name, definitions in item._fixtureinfo.name2fixturedefs.items():  # noqa: SLF001
        for definition in definitions:
            if id(getattr(definition.func, "__self__", None)) in objects:
                return name
    return None
