"""Selection of the test cells that execute changed code of a library, in the order to run them.

``distcompat reach MAP --changed PACKAGE@OLD..NEW --select FILE`` (``command``) has the changed
places of a library, each with who executes it (``changed``). It calls ``select``, writes
``file_lines`` to the file, and prints ``summary``. pytest reads the file by
``--distcompat-selection``, and runs the cells in its order.

A *cell* is one configuration of the tests: driver and strategy, precision, number of ranks, such as
``accelerate/fsdp2-fp32-w2``. An *action* is what a rank does in it, such as ``build`` or ``step``.
A *changed place* is a run of neighbouring lines of the library that the change replaces. A *way*
through it is one of its old statements, or one branch that leaves an old line: a replaced ``if``
has two, and a cell may execute one of them alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pytest_distcompat.ext.reach.changed import PlaceReach
from pytest_distcompat.ext.reach.map import ReachMap
from pytest_distcompat.ext.reach.tracer import BEFORE
from pytest_distcompat.failures import UsageProblem

#: Driver and cell -> the ways through changed places that the cell executes.
_WaysByCell = dict[str, set["Executed"]]
#: The numbers of the places that cells of each strategy execute.
_PlacesByStrategy = dict[str, set[int]]


class Executed(NamedTuple):
    """A way through a changed place that an action executes; a named tuple, to be sorted."""

    #: The number of the place among all changed places.
    place: int
    #: The number of the way among those of the place.
    way: int
    #: The action that executes it.
    action: str


@dataclass(frozen=True)
class SelectedCell:
    """A cell to run.

    Attributes:
        cell: Driver and cell: ``accelerate/fsdp2-fp32-w2``.
        actions: The actions in which it executes changed places.
        turn: The number of its turn, from 1. The cells of one turn together execute all ways
            through changed places that the cells of this and later turns execute.
    """

    cell: str
    actions: tuple[str, ...]
    turn: int

    def __str__(self) -> str:
        """Return the cell's line in the file: ``accelerate/fsdp2-fp32-w2: build, step``."""
        return f"{self.cell}: {', '.join(self.actions)}"


def select(
    reach_map: ReachMap, reached: Sequence[PlaceReach], turns: int | None = None
) -> list[SelectedCell]:
    """Return the cells that execute changed places, in the order in which to run them.

    They are chosen in turns: the cells of a turn execute each way through each place at least once.
    A cell that executes the same as an earlier one comes in a later turn, and there after cells of
    strategies that do not execute the place in an earlier turn.

    Args:
        reach_map: The map of the old release.
        reached: The changed places.
        turns: The number of turns, and so the number of cells that execute each way, if there are
            so many; None for all.
    """
    executed = _executed_by_cell(reached)
    # Code that runs on import does the same in all cells. So cells that import it are chosen in the
    # first turn only.
    on_import = _import_users(reach_map, reached)
    selected: list[SelectedCell] = []
    earlier: set[str] = set()
    places_by_strategy: _PlacesByStrategy = {}
    turn = 1
    while turns is None or turn <= turns:
        remaining = {cell: ways for cell, ways in executed.items() if cell not in earlier}
        if turn == 1:
            remaining = _merged(remaining, on_import)
        chosen = _one_turn(remaining, places_by_strategy)
        if not chosen:
            break
        for cell in chosen:
            actions = sorted({way.action for way in remaining[cell]})
            selected_cell = SelectedCell(cell, tuple(actions), turn)
            selected.append(selected_cell)
            earlier.add(cell)
            places = places_by_strategy.setdefault(_strategy_of(cell), set())
            places.update(way.place for way in remaining[cell])
        turn += 1
    return selected


def _strategy_of(cell: str) -> str:
    """Return the strategy of a driver and cell, such as ``accelerate/fsdp2-fp32-w2``."""
    _, _, cell_id = cell.rpartition("/")
    strategy, _, _ = cell_id.partition("-")
    return strategy


def _executed_by_cell(reached: Sequence[PlaceReach]) -> _WaysByCell:
    """Return the ways through changed places that each cell executes."""
    ways_by_cell: _WaysByCell = {}
    for number, place_reach in enumerate(reached):
        for way, contexts in enumerate(place_reach.ways):
            for context in contexts:
                executed = Executed(number, way, context.action)
                cell = context.driver_and_cell
                ways_by_cell.setdefault(cell, set()).add(executed)
    return ways_by_cell


def _import_users(reach_map: ReachMap, reached: Sequence[PlaceReach]) -> _WaysByCell:
    """Return the changed places outside functions, by the cells that use their files."""
    ways_by_cell: _WaysByCell = {}
    for number, place_reach in enumerate(reached):
        file_id = place_reach.place.file
        if not place_reach.on_import or file_id not in reach_map.files:
            continue
        # An import comes before the first action of a rank.
        executed = Executed(number, 0, BEFORE)
        file_reach = reach_map.coverage_of(file_id)
        lines_of_any_cell = file_reach.union.lines
        for context in file_reach.contexts_of_lines(lines_of_any_cell):
            cell = context.driver_and_cell
            ways_by_cell.setdefault(cell, set()).add(executed)
    return ways_by_cell


def _merged(first: _WaysByCell, second: _WaysByCell) -> _WaysByCell:
    """Return the ways of each cell in either dictionary."""
    merged = {cell: set(ways) for cell, ways in first.items()}
    for cell, ways in second.items():
        merged.setdefault(cell, set()).update(ways)
    return merged


def _one_turn(executed: _WaysByCell, places_by_strategy: _PlacesByStrategy) -> list[str]:
    """Return cells that together execute all ways that any of these cells executes.

    This is the greedy algorithm for a set cover: the next cell is the one that adds most to what
    the chosen cells execute. A way counts the more the fewer cells execute it. Ways through places
    that the cell's strategy does not execute in an earlier turn come first.

    Args:
        executed: The ways that each cell executes.
        places_by_strategy: The places that cells of earlier turns execute.
    """
    cell_counts: dict[Executed, int] = {}
    for ways in executed.values():
        for way in ways:
            cell_counts[way] = cell_counts.get(way, 0) + 1
    uncovered = set(cell_counts)
    chosen = []
    while uncovered:
        best_cell = ""
        best_gain = (0.0, 0.0)
        for cell in sorted(executed):
            known_places = places_by_strategy.get(_strategy_of(cell), set())
            gain = 0.0
            gain_by_strategy = 0.0
            # Sorted, because the sum of floating-point numbers depends on their order.
            for way in sorted(executed[cell] & uncovered):
                gain += 1 / cell_counts[way]
                if way.place not in known_places:
                    gain_by_strategy += 1 / cell_counts[way]
            if (gain_by_strategy, gain) > best_gain:
                best_cell = cell
                best_gain = (gain_by_strategy, gain)
        chosen.append(best_cell)
        uncovered -= executed[best_cell]
    return chosen


def file_lines(
    change: str, selected: Sequence[SelectedCell], reach_map: ReachMap, pattern: str | None = None
) -> Iterator[str]:
    """Yield the lines of the file that ``--distcompat-selection`` reads.

    The cells of the first turn come first. Then a line with ``*`` stands for cells that the map
    does not have, such as cells that only the new release can run. The cells of later turns follow.
    Lines with ``-`` name the cells of the map that were not selected, so that ``*`` does not stand
    for them.

    Args:
        change: What has changed.
        selected: The selected cells.
        reach_map: The map of the old release.
        pattern: The pattern of the cells to choose from; None for all.
    """
    yield (
        f"# {change}: the cells that execute what changes, in the order to run them, "
        "and in which actions they do"
    )
    for cell in selected:
        if cell.turn == 1:
            yield str(cell)
    yield f"* {pattern or '*'}"
    for cell in selected:
        if cell.turn > 1:
            yield str(cell)
    named = {cell.cell for cell in selected}
    for cell_of_map in dict.fromkeys(context.driver_and_cell for context in reach_map.contexts()):
        if cell_of_map not in named:
            yield f"- {cell_of_map}"


def summary(selected: Sequence[SelectedCell]) -> str:
    """Return one line with the number of selected cells, and of those of the first turn."""
    first = [cell for cell in selected if cell.turn == 1]
    return (
        f"selected cells: {len(selected)}; the first {len(first)} execute each way through each "
        "changed place that any cell executes"
    )


def check_release(reach_map: ReachMap, library: str, release: str | None) -> None:
    """Raise UsageProblem unless the map was made with the old release of the library."""
    mapped = reach_map.versions.get(library)
    if release and mapped and release != mapped:
        raise UsageProblem(f"the map is of {library} {mapped}, and the old release is {release}")
