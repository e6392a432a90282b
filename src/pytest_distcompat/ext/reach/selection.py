"""Selection of the test cells that execute changed code of a library, in the order to run them.

``distcompat reach MAP --changed PACKAGE@OLD..NEW --select FILE`` (``command``) has the changed
places of a library, each with who executes it (``changed``). It calls ``select``, writes
``file_lines`` to the file, and prints ``summary``. pytest reads the file by
``--distcompat-selection``, and runs the cells in its order.

A *cell* is one configuration of the tests: driver and strategy, precision, number of ranks, such as
``accelerate/fsdp2-fp32-w2``. An *action* is what a rank does in it, such as ``build`` or ``step``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pytest_distcompat.ext.reach.changed import PlaceReach
from pytest_distcompat.ext.reach.map import ReachMap
from pytest_distcompat.ext.reach.tracer import BEFORE
from pytest_distcompat.failures import UsageProblem

#: Driver and cell -> the changed places that the cell executes.
_PlacesByCell = dict[str, set["Executed"]]


class Executed(NamedTuple):
    """A changed place that an action of a cell executes; a named tuple, because it is sorted."""

    #: The number of the place among all changed places.
    place: int
    #: The action that executes it.
    action: str


@dataclass(frozen=True)
class SelectedCell:
    """A cell to run.

    Attributes:
        cell: Driver and cell: ``accelerate/fsdp2-fp32-w2``.
        actions: The actions in which it executes changed places.
        turn: The number of its turn, from 1. The cells of one turn together execute all changed
            places that the cells of this and later turns execute.
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

    They are chosen in turns: the cells of a turn execute each place at least once. A cell that
    executes the same places as an earlier one comes in a later turn.

    Args:
        reach_map: The map of the old release.
        reached: The changed places.
        turns: The number of turns, and so the number of cells that execute each place, if there are
            so many; None for all.
    """
    executed = _executed_by_cell(reached)
    # Code that runs on import does the same in all cells. So cells that import it are chosen in the
    # first turn only.
    on_import = _import_users(reach_map, reached)
    selected: list[SelectedCell] = []
    earlier: set[str] = set()
    turn = 1
    while turns is None or turn <= turns:
        remaining = {cell: places for cell, places in executed.items() if cell not in earlier}
        if turn == 1:
            remaining = _merged(remaining, on_import)
        chosen = _one_turn(remaining)
        if not chosen:
            break
        for cell in chosen:
            actions = sorted({place.action for place in remaining[cell]})
            selected.append(SelectedCell(cell, tuple(actions), turn))
            earlier.add(cell)
        turn += 1
    return selected


def _executed_by_cell(reached: Sequence[PlaceReach]) -> _PlacesByCell:
    """Return the changed places that each cell executes."""
    places_by_cell: _PlacesByCell = {}
    for number, place_reach in enumerate(reached):
        for context in place_reach.contexts:
            executed = Executed(number, context.action)
            places_by_cell.setdefault(context.place, set()).add(executed)
    return places_by_cell


def _import_users(reach_map: ReachMap, reached: Sequence[PlaceReach]) -> _PlacesByCell:
    """Return the changed places outside functions, by the cells that use their files."""
    places_by_cell: _PlacesByCell = {}
    for number, place_reach in enumerate(reached):
        file_id = place_reach.place.file
        if not place_reach.on_import or file_id not in reach_map.files:
            continue
        # An import comes before the first action of a rank.
        executed = Executed(number, BEFORE)
        file_reach = reach_map.coverage_of(file_id)
        for context in file_reach.contexts_of_lines(file_reach.union.lines):
            places_by_cell.setdefault(context.place, set()).add(executed)
    return places_by_cell


def _merged(first: _PlacesByCell, second: _PlacesByCell) -> _PlacesByCell:
    """Return the places of each cell in either dictionary."""
    merged = {cell: set(places) for cell, places in first.items()}
    for cell, places in second.items():
        merged.setdefault(cell, set()).update(places)
    return merged


def _one_turn(executed: _PlacesByCell) -> list[str]:
    """Return cells that together execute all places that any of these cells executes.

    This is the greedy algorithm for a set cover: the next cell is the one that adds most to what
    the chosen cells execute. A place counts the more the fewer cells execute it.
    """
    cell_counts: dict[Executed, int] = {}
    for places in executed.values():
        for place in places:
            cell_counts[place] = cell_counts.get(place, 0) + 1
    uncovered = set(cell_counts)
    chosen = []
    while uncovered:
        best_cell = ""
        best_gain = 0.0
        for cell in sorted(executed):
            # Sorted, because the sum of floating-point numbers depends on their order.
            added = sorted(executed[cell] & uncovered)
            gain = sum(1 / cell_counts[place] for place in added)
            if gain > best_gain:
                best_cell = cell
                best_gain = gain
        chosen.append(best_cell)
        uncovered -= executed[best_cell]
    return chosen


def file_lines(
    change: str, selected: Sequence[SelectedCell], reach_map: ReachMap, pattern: str | None = None
) -> Iterator[str]:
    """Yield the lines of the file that ``--distcompat-selection`` reads.

    The cells of the first turn come first. Then a line with ``*`` stands for cells that the map
    does not have, such as cells that only the new release can run. The cells of later turns follow.
    Lines with ``-`` name the cells of the map that execute nothing of the change, so that ``*``
    does not stand for them.

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
    for place in dict.fromkeys(context.place for context in reach_map.contexts()):
        if place not in named:
            yield f"- {place}"


def summary(selected: Sequence[SelectedCell]) -> str:
    """Return one line with the number of selected cells, and of those of the first turn."""
    first = [cell for cell in selected if cell.turn == 1]
    return (
        f"selected cells: {len(selected)}; the first {len(first)} execute each changed place "
        "that any cell executes"
    )


def check_release(reach_map: ReachMap, library: str, release: str | None) -> None:
    """Raise UsageProblem unless the map was made with the old release of the library."""
    mapped = reach_map.versions.get(library)
    if release and mapped and release != mapped:
        raise UsageProblem(f"the map is of {library} {mapped}, and the old release is {release}")
