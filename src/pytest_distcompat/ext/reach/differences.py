"""Where the values of a cell may have changed: the functions that differ between two maps in what the cell executes of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from pytest_distcompat.ext.reach.branches import Branch, Executed, Function
from pytest_distcompat.ext.reach.changed import PlaceReach
from pytest_distcompat.ext.reach.libraries import FileId
from pytest_distcompat.ext.reach.map import FileReach, ReachMap
from pytest_distcompat.ext.reach.text import fitted
from pytest_distcompat.grouping import grouped
from pytest_distcompat.report.values import Extent, ValueChange

#: What a rank does before its first step is done.
_BUILDS = frozenset({"start", "build_model", "build"})
#: How many functions or places are listed for cells that differ alike.
_LISTED = 10


@dataclass(frozen=True)
class FunctionDifference:
    """A function of which a cell executes something else than in the earlier release.

    Attributes:
        file: Its file.
        function: Its qualified name.
        how: What is different.
    """

    file: FileId
    function: str
    how: str

    def __str__(self) -> str:
        """Return it as one line."""
        return f"{self.file} {self.function}: {self.how}"


@dataclass(frozen=True)
class _Profile:
    """What a cell executes of a function, by the text of its source, since a release moves lines.

    Attributes:
        executed: Whether the cell executes it.
        source: The statements by their distance from the first, and the texts of all branches.
        taken: How often branches of each text are taken.
    """

    executed: bool
    source: tuple[object, ...]
    taken: Counter[tuple[str, str]]


def function_differences(
    earlier: ReachMap, later: ReachMap, change: ValueChange
) -> list[FunctionDifference]:
    """Return the functions that the cell of a change executes, before its values differ, and that differ between the maps."""
    actions = actions_before(change)
    place = f"{change.driver}/{change.cell}"
    differences: list[FunctionDifference] = []
    for file_id in dict.fromkeys((*earlier.files, *later.files)):
        before = _profiles(earlier, file_id, place, actions)
        after = _profiles(later, file_id, place, actions)
        for name in dict.fromkeys((*before, *after)):
            how = _difference(before.get(name), after.get(name))
            if how:
                differences.append(FunctionDifference(file_id, name, how))
    return differences


def actions_before(change: ValueChange) -> frozenset[str] | None:
    """Return the actions that a cell has done when its values differ first; None for all."""
    if change.extent is Extent.FORMAT:
        return None
    words = change.first.split()
    if words[0] == "build":
        return _BUILDS
    return _BUILDS | {"step"} if "step" in words else None


def _profiles(
    reach_map: ReachMap, file_id: FileId, place: str, actions: frozenset[str] | None
) -> dict[str, _Profile]:
    """Return the profile of each function of a file by its name; none of a file that the map has not."""
    if file_id not in reach_map.files:
        return {}
    executed = Executed()
    for context, part in reach_map.executed.get(file_id, {}).items():
        if context.place == place and (actions is None or context.action in actions):
            executed |= part
    file_reach = reach_map.coverage_of(file_id)
    branches = grouped(
        (branch.function, (branch, bool(executed.branches >> number & 1)))
        for number, branch in enumerate(file_reach.file.branches)
    )
    profiles: dict[str, _Profile] = {}
    for function in file_reach.file.functions:
        own = branches.get(function.name, [])
        profiles[function.name] = _profile(file_reach, function, executed, own)
    return profiles


def _profile(
    file_reach: FileReach,
    function: Function,
    executed: Executed,
    branches: Sequence[tuple[Branch, bool]],
) -> _Profile:
    texts = [(branch.text, branch.target_text) for branch, _ in branches]
    taken = Counter((branch.text, branch.target_text) for branch, is_taken in branches if is_taken)
    statements = (file_reach.file.statements & function.body) >> function.first
    return _Profile(bool(executed.lines & function.body), (statements, *texts), taken)


def _difference(before: _Profile | None, after: _Profile | None) -> str:
    """Return what is different about a function; empty if nothing is that the cell executes."""
    was_executed = before is not None and before.executed
    is_executed = after is not None and after.executed
    if was_executed and not is_executed:
        return "is not executed any more"
    if is_executed and not was_executed:
        return "is newly executed"
    if not was_executed or before is None or after is None:
        return ""
    if before.source != after.source:
        return "has other statements"
    if before.taken != after.taken:
        return "takes other branches"
    return ""


def difference_lines(
    changes: Iterable[ValueChange],
    earlier: ReachMap | None,
    later: ReachMap,
    places: Sequence[PlaceReach],
) -> Iterator[str]:
    """Yield the lines about cells whose values changed, those together of which the same functions and places differ.

    Args:
        changes: The cells.
        earlier: The map of the earlier release, if there is one.
        later: The map of the later release, or of the only one.
        places: What a release changes, with who executes it.
    """
    alike: dict[tuple[str, ...], list[ValueChange]] = {}
    for change in changes:
        lines = [f"  {line}" for line in _changed_places(change, places)]
        if earlier is not None:
            lines += [
                f"  {difference}" for difference in function_differences(earlier, later, change)
            ]
        alike.setdefault(tuple(lines), []).append(change)
    for lines_alike, cells in alike.items():
        for change in cells:
            yield fitted(f"{change.cell} ({change.driver}): {change.extent.value}: {change.what}")
        yield from map(fitted, lines_alike[:_LISTED])
        if len(lines_alike) > _LISTED:
            yield f"  and {len(lines_alike) - _LISTED} more"
        if not lines_alike:
            yield "  nothing that the cell executes before differs in the map: another package may have changed"


def _changed_places(change: ValueChange, places: Sequence[PlaceReach]) -> Iterator[str]:
    """Yield the changed places that a cell executes before its values differ."""
    actions = actions_before(change)
    for place_reach in places:
        place = place_reach.place
        for context in place_reach.contexts:
            if context.place == f"{change.driver}/{change.cell}" and (
                actions is None or context.action in actions
            ):
                yield f"{place.file}:{place.line} {place_reach.function}: {place.text}"
                break
