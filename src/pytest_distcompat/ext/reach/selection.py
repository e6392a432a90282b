"""The cells that a change of a library concerns, in the order to run them, as a file for pytest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pytest_distcompat.ext.reach.changed import PlaceReach
from pytest_distcompat.ext.reach.map import ReachMap
from pytest_distcompat.ext.reach.tracer import BEFORE
from pytest_distcompat.failures import UsageProblem

#: How an executed place is known: its number among the changed places, and the action that executes it.
Executed = tuple[int, str]


@dataclass(frozen=True)
class SelectedCell:
    """A cell to run.

    Attributes:
        cell: Driver and cell.
        actions: The actions in which it executes changed places.
        turn: 1 if it is among the first cells that together execute all places that any cell does; 2 if it is among the
            next that do so again, and so on.
    """

    cell: str
    actions: tuple[str, ...]
    turn: int

    def __str__(self) -> str:
        """Return its line of the file."""
        return f"{self.cell}: {', '.join(self.actions)}"


def select(
    reach_map: ReachMap, reached: Sequence[PlaceReach], turns: int | None = None
) -> list[SelectedCell]:
    """Return the cells that execute changed places, in the order to run them.

    The next cell is always the one that executes most of what no earlier cell of its turn does, where a place counts more the
    fewer cells execute it. So a cell that executes the same as an earlier one comes in a later turn.

    Args:
        reach_map: The map of the old release.
        reached: The changed places.
        turns: How many cells are to execute each place, if so many do; None for all.
    """
    executed = _executed_by_cell(reached)
    # What runs on import is the same in all cells: those that use the file are tried in the first turn only.
    on_import = _import_users(reach_map, reached)
    selected: list[SelectedCell] = []
    turn = 1
    while turns is None or turn <= turns:
        earlier = {selected_cell.cell for selected_cell in selected}
        left = {cell: places for cell, places in executed.items() if cell not in earlier}
        if turn == 1:
            left = _merged(left, on_import)
        chosen = _one_turn(left)
        if not chosen:
            break
        for cell in chosen:
            actions = sorted({action for _, action in left[cell]})
            selected.append(SelectedCell(cell, tuple(actions), turn))
        turn += 1
    return selected


def _executed_by_cell(reached: Sequence[PlaceReach]) -> dict[str, set[Executed]]:
    """Return what each cell executes of the changed places."""
    executed: dict[str, set[Executed]] = {}
    for number, place_reach in enumerate(reached):
        for context in place_reach.contexts:
            executed.setdefault(context.place, set()).add((number, context.action))
    return executed


def _import_users(reach_map: ReachMap, reached: Sequence[PlaceReach]) -> dict[str, set[Executed]]:
    """Return, for the changed places outside functions, the cells that execute any function of their files."""
    users: dict[str, set[Executed]] = {}
    for number, place_reach in enumerate(reached):
        file_id = place_reach.place.file
        if place_reach.on_import and file_id in reach_map.files:
            file_reach = reach_map.coverage_of(file_id)
            for context in file_reach.contexts_of_lines(file_reach.union.lines):
                # A rank starts with it, so that all its checks depend on it.
                users.setdefault(context.place, set()).add((number, BEFORE))
    return users


def _merged(
    first: dict[str, set[Executed]], second: dict[str, set[Executed]]
) -> dict[str, set[Executed]]:
    merged = {cell: set(places) for cell, places in first.items()}
    for cell, places in second.items():
        merged.setdefault(cell, set()).update(places)
    return merged


def _one_turn(executed: dict[str, set[Executed]]) -> list[str]:
    """Return cells that together execute everything that any of these cells does, the most specific first."""
    cell_counts: dict[Executed, int] = {}
    for places in executed.values():
        for place in places:
            cell_counts[place] = cell_counts.get(place, 0) + 1
    left = set(cell_counts)
    chosen = []
    while left:
        best, most = "", 0.0
        for cell in sorted(executed):
            # In one order, since floating point sums depend on it.
            gain = sum(1 / cell_counts[place] for place in sorted(executed[cell] & left))
            if gain > most:
                best, most = cell, gain
        chosen.append(best)
        left -= executed[best]
    return chosen


def file_lines(
    change: str, selected: Sequence[SelectedCell], reach_map: ReachMap, pattern: str | None = None
) -> Iterator[str]:
    """Yield the lines of the file that names the cells, as ``--distcompat-selection`` reads it.

    Cells of which the map knows nothing come after the first turn, such as those that only the new release can run. So the
    cells that the map has, and that execute nothing of the change, are named too.

    Args:
        change: What has changed.
        selected: The cells.
        reach_map: The map of the old release.
        pattern: The pattern of the cells that count; None for all.
    """
    yield f"# {change}: the cells that execute what changes, in the order to run them, and in which actions they do"
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
    """Return one line that says how many cells are selected, and how many of them are enough to execute everything once."""
    first = [cell for cell in selected if cell.turn == 1]
    return f"selected cells: {len(selected)}; the first {len(first)} execute each changed place that any cell executes"


def check_release(reach_map: ReachMap, library: str, release: str | None) -> None:
    """Raise UsageProblem if the map is of another release of the library than the old one."""
    mapped = reach_map.versions.get(library)
    if release and mapped and release != mapped:
        raise UsageProblem(f"the map is of {library} {mapped}, and the old release is {release}")
