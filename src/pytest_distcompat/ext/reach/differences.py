"""Where the values of a test cell may have changed between two releases of a library.

``distcompat reach MAP --compare EARLIER --values LAST.json TODAY.json`` has two maps and two
reports. A *map* says which functions and branches of the libraries each *cell* (test configuration,
such as ``fsdp2-fp32-w2``) executes. The reports say in which cells losses or other values changed,
and after which *action* (such as ``build`` or ``step``) first. ``command`` calls
``difference_lines``: for each such cell it yields the functions of which the cell executes
something else than before, and the changed places that it executes. One of these is likely the
cause.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from pytest_distcompat.ext.reach.branches import Branch, Executed, Function, SourceFile
from pytest_distcompat.ext.reach.changed import PlaceReach
from pytest_distcompat.ext.reach.libraries import FileId
from pytest_distcompat.ext.reach.map import Context, ReachMap
from pytest_distcompat.ext.reach.text import fitted
from pytest_distcompat.report.values import Extent, ValueChange

#: The actions of a rank before its first step. ``start`` is all before the first action.
_BUILDS = frozenset({"start", "build_model", "build"})
#: How many functions or places are listed for cells that differ alike.
_LISTED = 10


@dataclass(frozen=True)
class FunctionDifference:
    """A function of which a cell executes something else than in the earlier release.

    Attributes:
        file: Its file.
        function: Its qualified name: ``Accelerator.prepare``.
        how: What is different: ``takes other branches``.
    """

    file: FileId
    function: str
    how: str

    def __str__(self) -> str:
        """Return it as one line."""
        return f"{self.file} {self.function}: {self.how}"


@dataclass(frozen=True)
class _Profile:
    """What a cell executes of a function, by the text of its source.

    A release moves lines, so profiles of two releases could not be compared by line numbers.

    Attributes:
        executed: Whether the cell executes it.
        source: The statements as bits, by their distance from the definition, then the texts of all
            branches. Another source means that the function was changed.
        taken: (text of the branch's line, text of its target) -> how many branches with these texts
            the cell takes.
    """

    executed: bool
    source: tuple[object, ...]
    taken: Counter[tuple[str, str]]


def function_differences(
    earlier: ReachMap, later: ReachMap, change: ValueChange
) -> list[FunctionDifference]:
    """Return the functions of which a cell executes something else than in the earlier release.

    Only what it executes before its values differ first counts.

    Args:
        earlier: The map of the earlier release.
        later: The map of the later release.
        change: The cell, and which of its values differ.
    """
    actions = actions_before(change)
    cell = f"{change.driver}/{change.cell}"
    differences: list[FunctionDifference] = []
    for file_id in dict.fromkeys((*earlier.files, *later.files)):
        before = _profiles(earlier, file_id, cell, actions)
        after = _profiles(later, file_id, cell, actions)
        for name in dict.fromkeys((*before, *after)):
            how = _difference(before.get(name), after.get(name))
            if how:
                differences.append(FunctionDifference(file_id, name, how))
    return differences


def actions_before(change: ValueChange) -> frozenset[str] | None:
    """Return the actions that a cell has done when its values differ first; None for all.

    ``change.first`` says when that is: ``build``, or ``step 2``, say.
    """
    if change.extent is Extent.FORMAT:
        # Only the saved files differ, and they are written after all steps.
        return None
    words = change.first.split()
    if words[0] == "build":
        return _BUILDS
    if "step" in words:
        return _BUILDS | {"step"}
    return None


def _is_before(context: Context, cell: str, actions: frozenset[str] | None) -> bool:
    """Tell whether a context is one of these actions of a cell, with its driver."""
    if context.driver_and_cell != cell:
        return False
    return actions is None or context.action in actions


def _profiles(
    reach_map: ReachMap, file_id: FileId, cell: str, actions: frozenset[str] | None
) -> dict[str, _Profile]:
    """Return the profile of each function of a file by its name; empty if the map lacks the file.

    Args:
        reach_map: The map.
        file_id: The file.
        cell: Driver and cell: ``accelerate/fsdp2-fp32-w2``.
        actions: The actions that count; None for all.
    """
    if file_id not in reach_map.files:
        return {}
    # The lines and branches that count, each as the bits of one integer.
    executed = Executed()
    for context, executed_by_context in reach_map.executed.get(file_id, {}).items():
        if _is_before(context, cell, actions):
            executed |= executed_by_context
    file = reach_map.files[file_id]
    #: The name of a function -> its branches.
    branches: dict[str, list[_CellBranch]] = {}
    for number, branch in enumerate(file.branches):
        branch_bit = 1 << number
        is_taken = bool(executed.branches & branch_bit)
        branches.setdefault(branch.function, []).append(_CellBranch(branch, is_taken))
    profiles: dict[str, _Profile] = {}
    for function in file.functions:
        own_branches = branches.get(function.name, [])
        profiles[function.name] = _profile(file, function, executed, own_branches)
    return profiles


@dataclass(frozen=True)
class _CellBranch:
    """A branch, and whether the cell takes it."""

    branch: Branch
    is_taken: bool


def _profile(
    file: SourceFile,
    function: Function,
    executed: Executed,
    branches: Iterable[_CellBranch],
) -> _Profile:
    """Return what a cell executes of a function, of which these are the branches."""
    texts: list[tuple[str, str]] = []
    taken: Counter[tuple[str, str]] = Counter()
    for cell_branch in branches:
        branch = cell_branch.branch
        text = (branch.text, branch.target_text)
        texts.append(text)
        if cell_branch.is_taken:
            taken[text] += 1
    is_executed = bool(executed.lines & function.body)
    # Shifted, so that the numbers count from the definition: a release moves whole functions.
    statements = (file.statements & function.body) >> function.first
    return _Profile(is_executed, (statements, *texts), taken)


def _difference(before: _Profile | None, after: _Profile | None) -> str:
    """Return what is different about a function; empty if the cell executes no difference.

    A profile is None if the release does not have the function.
    """
    was_executed = before is not None and before.executed
    is_executed = after is not None and after.executed
    if was_executed and not is_executed:
        return "is not executed any more"
    if is_executed and not was_executed:
        return "is newly executed"
    if before is None or after is None or not was_executed:
        # The cell executes it in neither release.
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
    """Yield the lines about cells whose values changed.

    Cells of which the same functions and places differ are together.

    Args:
        changes: The cells.
        earlier: The map of the earlier release, if there is one.
        later: The map of the later release, or of the only one.
        places: The places of the source that the new release changes. ``contexts`` of each are the
            cells that execute it, each with the action in which it does.
    """
    #: The lines about differences -> the cells that have just these.
    changes_by_lines: dict[tuple[str, ...], list[ValueChange]] = {}
    for change in changes:
        lines = [f"  {line}" for line in _changed_places(change, places)]
        if earlier is not None:
            for difference in function_differences(earlier, later, change):
                lines.append(f"  {difference}")
        changes_by_lines.setdefault(tuple(lines), []).append(change)
    for shared_lines, alike in changes_by_lines.items():
        yield from _lines_of_alike(alike, shared_lines)


def _lines_of_alike(alike: Iterable[ValueChange], differences: Sequence[str]) -> Iterator[str]:
    """Yield a line for each of several cells, then the lines about what differs in all of them.

    ``fitted`` cuts a line to the width of a terminal.
    """
    for change in alike:
        cell = f"{change.cell} ({change.driver})"
        yield fitted(f"{cell}: {change.extent.value}: {change.what}")
    for line in differences[:_LISTED]:
        yield fitted(line)
    if len(differences) > _LISTED:
        yield f"  and {len(differences) - _LISTED} more"
    if not differences:
        yield (
            "  nothing that the cell executes before differs in the map: "
            "another package may have changed"
        )


def _changed_places(change: ValueChange, places: Sequence[PlaceReach]) -> Iterator[str]:
    """Yield the changed places that a cell executes before its values differ."""
    actions = actions_before(change)
    cell = f"{change.driver}/{change.cell}"
    for place_reach in places:
        place = place_reach.place
        for context in place_reach.contexts:
            if _is_before(context, cell, actions):
                # Once, although the cell may execute it in several actions.
                position = f"{place.file}:{place.line}"
                yield f"{position} {place_reach.function}: {place.text}"
                break
