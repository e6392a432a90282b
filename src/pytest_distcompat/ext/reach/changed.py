"""A change of a library: which test cells execute the changed places, and which no cell executes.

A *cell* is one configuration of the tests: a driver (the trainer) and strategy, precision, number
of ranks and options, such as ``accelerate/fsdp2-fp32-w2``. A *map* (``map``) says which lines of
the installed libraries each cell executed, and in which *action*, such as ``build`` or ``step``.

``command`` calls ``reached_places`` with the map of the old release and the changed places
(``diffs``). For each place it looks up the old lines. ``text`` prints the result, and ``selection``
chooses cells to run from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pytest_distcompat.ext.reach.branches import SourceFile
from pytest_distcompat.ext.reach.diffs import ChangedPlace
from pytest_distcompat.ext.reach.map import Context, FileReach, ReachMap


@dataclass(frozen=True)
class PlaceReach:
    """A changed place, the function of the old release that it is in, and who executes it.

    Attributes:
        place: The place.
        function: The qualified name of the function, such as ``Accelerator.prepare``; empty outside
            of functions, and for a place that defines a new one.
        contexts: The cells that execute any of its old statements, each with the action in which it
            does.
        ways: For each old statement and each branch from an old line, who executes that one; each
            such group of contexts once. A replaced ``if`` has a way for each outcome. ``selection``
            chooses cells so that each way is executed.
    """

    place: ChangedPlace
    function: str
    contexts: tuple[Context, ...]
    ways: tuple[tuple[Context, ...], ...]

    @property
    def on_import(self) -> bool:
        """Whether no known function has it, so that it runs when the module is imported.

        Ranks are forked from a process that has imported it, so no map says who executes it. The
        functions of a file that the map lacks are unknown, so it is True for all places of such a
        file that define no new function.
        """
        return not self.function and not self.place.defines

    @property
    def cells(self) -> list[str]:
        """Return the cells that execute it."""
        return list(dict.fromkeys(context.driver_and_cell for context in self.contexts))


@dataclass(frozen=True)
class CellReach:
    """A cell that executes changed places.

    Attributes:
        cell: Driver and cell: ``accelerate/fsdp2-fp32-w2``.
        places: How many it executes.
        alone: How many of them no other cell executes.
        weight: The sum over its places of one divided by the number of cells that execute the
            place.
    """

    cell: str
    places: int
    alone: int
    weight: float


def reached_places(reach_map: ReachMap, places: Iterable[ChangedPlace]) -> list[PlaceReach]:
    """Return for each place who executes it: nobody for new functions, and for unknown files.

    Args:
        reach_map: The map of the old release.
        places: The changed places.
    """
    reached = []
    for place in places:
        if place.file not in reach_map.files or place.defines:
            reached.append(PlaceReach(place, function="", contexts=(), ways=()))
        else:
            file_reach = reach_map.coverage_of(place.file)
            reached.append(_reached_place(file_reach, place))
    return reached


def _reached_place(file_reach: FileReach, place: ChangedPlace) -> PlaceReach:
    """Return who executes the old statements of a place, and its ways."""
    function_name, statements = _old_statements(file_reach.file, place)
    bits = 0
    ways: dict[tuple[Context, ...], None] = {}
    for statement in statements:
        bits |= statement
        ways[file_reach.contexts_of_lines(statement)] = None
    for contexts in _contexts_of_branches(file_reach, place):
        ways[contexts] = None
    # Without the empty group: no choice of cells executes what no cell has executed.
    ways.pop((), None)
    return PlaceReach(place, function_name, file_reach.contexts_of_lines(bits), tuple(ways))


def _old_statements(file: SourceFile, place: ChangedPlace) -> tuple[str, list[int]]:
    """Return the name of the function that a place is in, and the place's old statements.

    Where lines are only added, the statements before and after them count. Sets of lines are
    integers, in which bit ``n`` stands for line ``n``. A statement is the bit of its first line; in
    place of the ``def`` there are all lines of the function's body.

    Args:
        file: The file of the old release.
        place: The place.

    Returns:
        The name of the first function, empty outside of functions; and each statement once.
    """
    function_name = ""
    statements: dict[int, None] = {}
    # ``removed`` are the numbers of the old lines that are gone or replaced. Where there are none,
    # new lines come after the old line ``after``. The statement before them may be in another
    # branch than they, and so may the one after.
    for line in place.removed or (place.after, place.after + 1):
        # A place outside all functions runs on import. ``line + 1``: new lines may come first in a
        # body, after the line of the ``def``.
        function = file.function_at(line) or file.function_at(line + 1)
        if function is None:
            continue
        function_name = function_name or function.name
        statement = 1 << file.statement_at(line)
        if statement & function.body:
            statements[statement] = None
        else:
            # The statement of this line begins before the body: it is the ``def`` itself. The line
            # ends the signature, or comes before the body's first statement. So all count that
            # execute any line of the body.
            statements[function.body] = None
    return function_name, list(statements)


def _contexts_of_branches(
    file_reach: FileReach, place: ChangedPlace
) -> Iterator[tuple[Context, ...]]:
    """Yield who executes each branch from an old line of a place.

    A branch is a way from one line to another, such as from an ``if`` to the line after it.
    """
    removed = set(place.removed)
    # Bit ``number`` stands for the branch with that index.
    for number, branch in enumerate(file_reach.file.branches):
        if branch.line in removed:
            yield file_reach.contexts_of_branches(1 << number)


def cells_by_specificity(reached: Iterable[PlaceReach]) -> list[CellReach]:
    """Return the cells that execute changed places, first those whose places few others execute."""
    # For each place of a cell, how many cells execute it.
    cell_counts: dict[str, list[int]] = {}
    for place_reach in reached:
        cells = place_reach.cells
        for cell in cells:
            cell_counts.setdefault(cell, []).append(len(cells))
    cell_reaches = []
    for cell, counts in cell_counts.items():
        weight = 0.0
        for count in counts:
            weight += 1 / count
        cell_reach = CellReach(
            cell=cell,
            places=len(counts),
            alone=counts.count(1),
            weight=weight,
        )
        cell_reaches.append(cell_reach)
    return sorted(cell_reaches, key=lambda cell_reach: (-cell_reach.weight, cell_reach.cell))
