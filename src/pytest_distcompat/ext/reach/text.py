"""A map as text, in lines of at most 100 columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from pytest_distcompat.ext.reach.branches import Branch
from pytest_distcompat.ext.reach.changed import CellReach, PlaceReach, cells_by_specificity
from pytest_distcompat.ext.reach.map import (
    BranchReach,
    Context,
    Counts,
    FileReach,
    FunctionReach,
    ReachMap,
)
from pytest_distcompat.grouping import grouped

#: The columns of a terminal that lines fit in.
WIDTH = 100
#: How many cells a line names; it counts the others.
CELLS_NAMED = 2
#: The order of branches that no cell reaches.
ORDER = "public functions first, then those that read an argument or a setting"


def headline(reach_map: ReachMap) -> str:
    """Return one line with the numbers of the whole map."""
    counts = Counts.total(reach_map.coverage_of(file_id).counts() for file_id in reach_map.files)
    contexts = reach_map.contexts()
    cells = {context.place for context in contexts}
    drivers = {context.driver for context in contexts}
    reached = f"{counts.reached_branches} of {counts.branches} branches ({counts.percent:.1f} %)"
    return f"{reached} are executed by {_counted(len(cells), 'cell')} of {_counted(len(drivers), 'driver')}"


def _counted(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless the number is 1."""
    if number == 1:
        return f"{number} {noun}"
    return f"{number} {noun}s"


def overview(reach_map: ReachMap) -> Iterator[str]:
    """Yield the lines about each library, then about each of its files."""
    yield headline(reach_map)
    tools = []
    for name in ("python", "coverage"):
        version = reach_map.versions.get(name)
        if version:
            tools.append(f"{name} {version}")
    if tools:
        yield f"measured by {', '.join(tools)}"
    yield ""
    yield from library_table(reach_map)
    for library in reach_map.libraries():
        yield ""
        yield titled(reach_map, library)
        yield from file_table(reach_map, library)


def titled(reach_map: ReachMap, library: str) -> str:
    """Return a library with its release."""
    version = reach_map.versions.get(library, "")
    return fitted(f"{library} {version}".rstrip())


def library_table(reach_map: ReachMap) -> Iterator[str]:
    """Yield a line for each library."""
    yield _row("library", "files", "functions", "branches")
    for library in reach_map.libraries():
        counts = counts_of(reach_map, library)
        yield _numbers(
            titled(reach_map, library), f"{counts.reached_files} of {counts.files}", counts
        )


def file_table(reach_map: ReachMap, library: str) -> Iterator[str]:
    """Yield a line for each file of a library that defines functions."""
    yield _row("file", "", "functions", "branches")
    for file_reach in reach_map.coverage_of_library(library):
        # Many files define nothing but names.
        if file_reach.file.functions:
            yield _numbers(f"  {file_reach.file.id.path}", "", file_reach.counts())


def counts_of(reach_map: ReachMap, library: str) -> Counts:
    """Return the numbers of a library."""
    return Counts.total(
        file_reach.counts() for file_reach in reach_map.coverage_of_library(library)
    )


def _row(name: str, files: str, functions: str, branches: str) -> str:
    return f"{fitted(name, 46):46} {files:>12} {functions:>14} {branches:>24}"


def _numbers(name: str, files: str, counts: Counts) -> str:
    """Return a row with the numbers of functions and branches."""
    functions = f"{counts.reached_functions} of {counts.functions}"
    branches = f"{counts.reached_branches} of {counts.branches}, {counts.percent:5.1f} %"
    return _row(name, files, functions, branches)


def functions(reach_map: ReachMap, library: str) -> Iterator[str]:
    """Yield the lines about all functions and branches of a library that some cell executes, and those that none does."""
    yield titled(reach_map, library)
    for file_reach in reach_map.coverage_of_library(library):
        yield from _functions_of_file(file_reach)


def _functions_of_file(file_reach: FileReach) -> Iterator[str]:
    """Yield the lines about a file: its name, then its public functions, then the others."""
    counts = file_reach.counts()
    if not counts.functions:
        return
    yield ""
    yield fitted(f"{file_reach.file.id}: {counts.reached_branches} of {counts.branches} branches")
    public_first = sorted(
        file_reach.functions(), key=lambda function_reach: not function_reach.function.public
    )
    for function_reach in public_first:
        yield from _function_lines(function_reach)


def _function_lines(function_reach: FunctionReach) -> Iterator[str]:
    """Yield the line of a function, and two for each of its branches if a cell executes it."""
    executed_by = cells_text(function_reach.contexts)
    branches = function_reach.branches
    if branches:
        reached_branches = [branch_reach for branch_reach in branches if branch_reach.contexts]
        executed_by = f"{len(reached_branches)} of {len(branches)} branches, {executed_by}"
    yield fitted(f"  {function_reach.function.name}: {executed_by}")
    if not function_reach.contexts:
        # No cell executes any of its branches.
        return
    for branch_reach in branches:
        yield fitted(f"    {_branch_text(branch_reach.branch)}")
        yield fitted(f"        {cells_text(branch_reach.contexts)}")


def _branch_text(branch: Branch) -> str:
    return f"{branch.arrow:14}  {branch.text}"


def cells_text(contexts: Sequence[Context]) -> str:
    """Return how many cells there are, with some of them, and the actions; ``no cell`` if there are none."""
    if not contexts:
        return "no cell"
    # Dicts, because they keep the order and have each only once.
    cells = list(dict.fromkeys(context.place for context in contexts))
    actions = dict.fromkeys(context.action for context in contexts)
    text = (
        f"{_counted(len(cells), 'cell')} in {' '.join(actions)}: {', '.join(cells[:CELLS_NAMED])}"
    )
    if len(cells) > CELLS_NAMED:
        text += ", ..."
    return text


def missing(branches: Iterable[BranchReach], title: str) -> Iterator[str]:
    """Yield the lines about branches that no cell reaches, what users are likely to run into first.

    Args:
        branches: The branches.
        title: What they are, as a line that ends with their number.
    """
    ordered = sorted(branches, key=lambda branch_reach: branch_reach.order)
    yield fitted(f"{title}: {len(ordered)}")
    yield ORDER
    previous_heading = ""
    for branch_reach in ordered:
        heading = _function_heading(branch_reach)
        if heading != previous_heading:
            yield fitted(heading)
            previous_heading = heading
        yield fitted(f"    {_branch_text(branch_reach.branch)}")


def _function_heading(branch_reach: BranchReach) -> str:
    """Return the function of a branch, with the branch's rank: ``lib/trainer.py prepare (public, setting)``."""
    branch = branch_reach.branch
    rank = branch.rank.name.lower().replace("_", ", ")
    return f"{branch_reach.file} {branch.function} ({rank})"


def changed(places: Sequence[PlaceReach]) -> Iterator[str]:
    """Yield the lines about a change: the cells that execute its places, the places, and those that no cell executes."""
    executed = [place_reach for place_reach in places if place_reach.contexts]
    yield _changed_headline(places)
    yield ""
    yield "cells, those first whose places few others execute"
    for cell in cells_by_specificity(places):
        yield _cell_line(cell)
    yield ""
    yield "places that cells execute, first those that few execute"
    for place_reach in sorted(executed, key=lambda place_reach: len(place_reach.cells)):
        yield from _place_lines(place_reach)
        yield fitted(f"        {cells_text(place_reach.contexts)}")
    yield ""
    yield from _unexecuted_lines(places)


def changed_unexecuted(places: Sequence[PlaceReach]) -> Iterator[str]:
    """Yield the lines about a change of which another file has the cells: its size, and the places that no cell executes."""
    yield _changed_headline(places)
    yield ""
    unexecuted = _unexecuted(places)
    yield f"places that no cell executes: {len(unexecuted)}"
    lines_by_function = grouped(
        (f"{place_reach.place.file} {place_reach.function}", place_reach)
        for place_reach in unexecuted
    )
    for function, function_places in lines_by_function.items():
        lines = [str(place_reach.place.line) for place_reach in function_places]
        yield fitted(f"  {function}: {', '.join(lines)}")
    definitions = [place_reach for place_reach in places if place_reach.place.defines]
    yield f"new functions and classes: {len(definitions)}"
    for place_reach in definitions:
        yield fitted(
            f"  {place_reach.place.file}:{place_reach.place.line} {place_reach.place.text}"
        )
    yield _on_import_line(places)


def _unexecuted(places: Sequence[PlaceReach]) -> list[PlaceReach]:
    """Return the places in functions of the old release that no cell executes."""
    return [
        place_reach for place_reach in places if place_reach.function and not place_reach.contexts
    ]


def _on_import_line(places: Sequence[PlaceReach]) -> str:
    on_import = [place_reach for place_reach in places if place_reach.on_import]
    return f"places outside functions, which run on import: {len(on_import)}"


def _changed_headline(places: Sequence[PlaceReach]) -> str:
    executed = [place_reach for place_reach in places if place_reach.contexts]
    files = {place_reach.place.file for place_reach in places}
    return f"{_counted(len(places), 'changed place')} in {_counted(len(files), 'file')}; cells execute {len(executed)}"


def _unexecuted_lines(places: Sequence[PlaceReach]) -> Iterator[str]:
    """Yield the lines about places that no cell executes, or of which the map knows nothing."""
    yield from _titled_places("places that no cell executes", _unexecuted(places))
    definitions = [place_reach for place_reach in places if place_reach.place.defines]
    yield from _titled_places("new functions and classes", definitions)
    yield _on_import_line(places)


def _cell_line(cell: CellReach) -> str:
    line = f"  {cell.cell}: {_counted(cell.places, 'place')}"
    if cell.alone:
        line += f", {cell.alone} of them alone"
    return fitted(line)


def _titled_places(title: str, places: Sequence[PlaceReach]) -> Iterator[str]:
    yield f"{title}: {len(places)}"
    for place_reach in places:
        yield from _place_lines(place_reach)
    yield ""


def _place_lines(place_reach: PlaceReach) -> Iterator[str]:
    place = place_reach.place
    yield fitted(f"  {place.file}:{place.line} {place_reach.function}".rstrip())
    yield fitted(f"      {place.text}")


def unreached(reach_map: ReachMap, libraries: Sequence[str]) -> Iterator[BranchReach]:
    """Yield the branches of these libraries that no cell reaches."""
    for file_id in reach_map.files:
        if file_id.library not in libraries:
            continue
        for branch_reach in reach_map.coverage_of(file_id).branches():
            if not branch_reach.contexts:
                yield branch_reach


def fitted(line: str, width: int = WIDTH) -> str:
    """Return the line, cut if it has more columns."""
    if len(line) <= width:
        return line
    return f"{line[: width - 4]} ..."
