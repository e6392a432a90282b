"""The lines that ``distcompat reach`` prints: a map as text, 100 columns wide at most.

A *map* says which *cells* (test configurations, such as ``accelerate/fsdp2-fp32-w2``) execute which
functions and *branches* (ways from one line to another) of the installed libraries, and in which
*action* of a rank, such as ``build``. ``command`` calls the functions of this module with a map or
a part of it, and prints the lines; ``page`` uses some for HTML:

- ``overview``, with ``library_table`` and ``file_table``: numbers of each library and file;
- ``functions``: all functions of one library, with the cells that execute each;
- ``missing``: branches that no cell reaches;
- ``changed``, ``changed_unexecuted``: what a new release changes, and who executes that. A *place*
  is lines of a file that the new release replaces, removes or adds together.

``FunctionReach``, ``BranchReach`` and ``PlaceReach`` are parts of the source with ``contexts``: the
cells that execute them, each with an action. A ``FileReach`` has those of its functions and
branches.
"""

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

#: The columns of a terminal that lines fit in.
WIDTH = 100
#: How many cells a line names; it counts the others.
CELLS_NAMED = 2
#: The order of branches that no cell reaches.
ORDER = "public functions first, then those that read an argument or a setting"


def headline(reach_map: ReachMap) -> str:
    """Return one line with the numbers of the whole map.

    For example ``6372 of 38050 branches (16.7 %) are executed by 48 cells of 4 drivers``.
    """
    counts_of_files = [reach_map.coverage_of(file_id).counts() for file_id in reach_map.files]
    counts = Counts.total(counts_of_files)
    cells: set[str] = set()
    drivers: set[str] = set()
    for context in reach_map.contexts():
        cells.add(context.driver_and_cell)
        drivers.add(context.driver)
    branches = f"{counts.reached_branches} of {counts.branches} branches"
    cells_counted = _counted(len(cells), "cell")
    drivers_counted = _counted(len(drivers), "driver")
    executed_by = f"{cells_counted} of {drivers_counted}"
    return f"{branches} ({counts.percent:.1f} %) are executed by {executed_by}"


def _counted(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless the number is 1."""
    if number == 1:
        return f"{number} {noun}"
    return f"{number} {noun}s"


def overview(reach_map: ReachMap) -> Iterator[str]:
    """Yield the lines about each library, then about each of its files."""
    yield headline(reach_map)
    # What ran the libraries and recorded them: a map may have been written elsewhere.
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
    """Return a library with its release: ``accelerate 1.15.0``."""
    version = reach_map.versions.get(library, "")
    return fitted(f"{library} {version}".rstrip())


def library_table(reach_map: ReachMap) -> Iterator[str]:
    """Yield a line for each library."""
    yield _row("library", "files", "functions", "branches")
    for library in reach_map.libraries():
        counts = counts_of(reach_map, library)
        files = f"{counts.reached_files} of {counts.files}"
        yield _numbers(titled(reach_map, library), files, counts)


def file_table(reach_map: ReachMap, library: str) -> Iterator[str]:
    """Yield a line for each file of a library that defines functions."""
    yield _row("file", "", "functions", "branches")
    for file_reach in reach_map.coverage_of_library(library):
        file = file_reach.file
        # Many files define nothing but names.
        if file.functions:
            yield _numbers(f"  {file.id.path}", "", file_reach.counts())


def counts_of(reach_map: ReachMap, library: str) -> Counts:
    """Return the numbers of functions and branches of a library, and of those reached."""
    counts_of_files = [file_reach.counts() for file_reach in reach_map.coverage_of_library(library)]
    return Counts.total(counts_of_files)


def _row(name: str, files: str, functions: str, branches: str) -> str:
    """Return one row of a table, with the columns in their widths."""
    label = fitted(name, 46)
    return f"{label:46} {files:>12} {functions:>14} {branches:>24}"


def _numbers(name: str, files: str, counts: Counts) -> str:
    """Return a row with the numbers of functions and branches."""
    functions = f"{counts.reached_functions} of {counts.functions}"
    branches = f"{counts.reached_branches} of {counts.branches}"
    percent = f"{counts.percent:5.1f} %"
    return _row(name, files, functions, f"{branches}, {percent}")


def functions(reach_map: ReachMap, library: str) -> Iterator[str]:
    """Yield the lines about all functions and branches of a library, executed or not."""
    yield titled(reach_map, library)
    for file_reach in reach_map.coverage_of_library(library):
        yield from _functions_of_file(file_reach)


def _functions_of_file(file_reach: FileReach) -> Iterator[str]:
    """Yield the lines about a file: its name, then its public functions, then the others."""
    counts = file_reach.counts()
    if not counts.functions:
        return
    yield ""
    branches = f"{counts.reached_branches} of {counts.branches} branches"
    yield fitted(f"{file_reach.file.id}: {branches}")

    def is_internal(function_reach: FunctionReach) -> bool:
        return not function_reach.function.public

    for function_reach in sorted(file_reach.functions(), key=is_internal):
        yield from _function_lines(function_reach)


def _function_lines(function_reach: FunctionReach) -> Iterator[str]:
    """Yield the line of a function, and two for each of its branches if a cell executes it."""
    executed_by = cells_text(function_reach.contexts)
    branches = function_reach.branches
    if branches:
        reached = 0
        for branch_reach in branches:
            if branch_reach.contexts:
                reached += 1
        executed_by = f"{reached} of {len(branches)} branches, {executed_by}"
    yield fitted(f"  {function_reach.function.name}: {executed_by}")
    if not function_reach.contexts:
        # No cell executes any of its branches.
        return
    for branch_reach in branches:
        yield fitted(f"    {_branch_text(branch_reach.branch)}")
        yield fitted(f"        {cells_text(branch_reach.contexts)}")


def _branch_text(branch: Branch) -> str:
    """Return a branch as text: ``12 -> 15        if self.state.fsdp_plugin:``."""
    return f"{branch.arrow:14}  {branch.text}"


def cells_text(contexts: Sequence[Context]) -> str:
    """Return how many cells there are, with their actions and the names of two.

    For example ``3 cells in build step: torch/ddp-fp32-w2, torch/fsdp2-fp32-w2, ...``, and ``no
    cell`` for none. An action is what a rank does, such as ``build``.
    """
    if not contexts:
        return "no cell"
    # Dicts, because they keep the order and have each only once.
    cells: dict[str, None] = {}
    actions: dict[str, None] = {}
    for context in contexts:
        cells[context.driver_and_cell] = None
        actions[context.action] = None
    names = list(cells)[:CELLS_NAMED]
    counted = _counted(len(cells), "cell")
    text = f"{counted} in {' '.join(actions)}: {', '.join(names)}"
    if len(cells) > CELLS_NAMED:
        text += ", ..."
    return text


def missing(branches: Iterable[BranchReach], title: str) -> Iterator[str]:
    """Yield the lines about branches that no cell reaches, what users are likely to run into first.

    Args:
        branches: The branches.
        title: The first line, to which their number is added: ``branches that no cell reaches``.
    """
    ordered = sorted(branches, key=lambda branch_reach: branch_reach.order)
    yield fitted(f"{title}: {len(ordered)}")
    yield ORDER
    # Branches of one function stand below one heading.
    previous_heading = ""
    for branch_reach in ordered:
        heading = _function_heading(branch_reach)
        if heading != previous_heading:
            yield fitted(heading)
            previous_heading = heading
        yield fitted(f"    {_branch_text(branch_reach.branch)}")


def _function_heading(branch_reach: BranchReach) -> str:
    """Return the function of a branch, and how likely users run into the branch (``rank``).

    An example is ``lib/trainer.py prepare (public, setting)``: a function that users may call, and
    a condition that reads a setting.
    """
    branch = branch_reach.branch
    rank = branch.rank.name.lower().replace("_", ", ")
    return f"{branch_reach.file} {branch.function} ({rank})"


def changed(places: Sequence[PlaceReach]) -> Iterator[str]:
    """Yield the lines about a change of a library, which is a list of changed places.

    First the cells that execute any, then the places with their cells, then the places that no cell
    executes.
    """
    executed = _executed(places)
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
    """Yield the lines about a change whose cells are written to a file (``--select``).

    They have the size of the change, and the places that no cell executes.
    """
    yield _changed_headline(places)
    yield ""
    unexecuted = _unexecuted(places)
    yield f"places that no cell executes: {len(unexecuted)}"
    #: File and function -> the numbers of the lines at which its places begin.
    lines_by_function: dict[str, list[str]] = {}
    for place_reach in unexecuted:
        function = f"{place_reach.place.file} {place_reach.function}"
        lines_by_function.setdefault(function, []).append(str(place_reach.place.line))
    for function, lines in lines_by_function.items():
        yield fitted(f"  {function}: {', '.join(lines)}")
    definitions = _definitions(places)
    yield f"new functions and classes: {len(definitions)}"
    for place_reach in definitions:
        place = place_reach.place
        yield fitted(f"  {place.file}:{place.line} {place.text}")
    yield _on_import_line(places)


def _executed(places: Sequence[PlaceReach]) -> list[PlaceReach]:
    """Return the places that cells execute."""
    return [place_reach for place_reach in places if place_reach.contexts]


def _unexecuted(places: Sequence[PlaceReach]) -> list[PlaceReach]:
    """Return the places in functions of the old release that no cell executes.

    A place outside of functions, or one that defines a new function, has no ``function``.
    """
    unexecuted: list[PlaceReach] = []
    for place_reach in places:
        if place_reach.function and not place_reach.contexts:
            unexecuted.append(place_reach)
    return unexecuted


def _definitions(places: Sequence[PlaceReach]) -> list[PlaceReach]:
    """Return the places at which the new release defines a function or class."""
    return [place_reach for place_reach in places if place_reach.place.defines]


def _on_import_line(places: Sequence[PlaceReach]) -> str:
    """Return the line with the number of places outside of functions.

    Ranks do not execute these: they are forked from a process that has imported the library.
    """
    on_import = [place_reach for place_reach in places if place_reach.on_import]
    return f"places outside functions, which run on import: {len(on_import)}"


def _changed_headline(places: Sequence[PlaceReach]) -> str:
    """Return the first line: ``85 changed places in 19 files; cells execute 28``."""
    executed = _executed(places)
    files = {place_reach.place.file for place_reach in places}
    places_counted = _counted(len(places), "changed place")
    files_counted = _counted(len(files), "file")
    return f"{places_counted} in {files_counted}; cells execute {len(executed)}"


def _unexecuted_lines(places: Sequence[PlaceReach]) -> Iterator[str]:
    """Yield the lines about places that no cell executes, or of which the map says nothing.

    The latter are new functions and classes, and places that run on import.
    """
    yield from _titled_places("places that no cell executes", _unexecuted(places))
    yield from _titled_places("new functions and classes", _definitions(places))
    yield _on_import_line(places)


def _cell_line(cell: CellReach) -> str:
    """Return the line of a cell: how many places it executes, and how many no other cell does."""
    line = f"  {cell.cell}: {_counted(cell.places, 'place')}"
    if cell.alone:
        line += f", {cell.alone} of them alone"
    return fitted(line)


def _titled_places(title: str, places: Sequence[PlaceReach]) -> Iterator[str]:
    """Yield a title with the number of places, the lines of each, and an empty line."""
    yield f"{title}: {len(places)}"
    for place_reach in places:
        yield from _place_lines(place_reach)
    yield ""


def _place_lines(place_reach: PlaceReach) -> Iterator[str]:
    """Yield two lines: where a place is, and its first line of code."""
    place = place_reach.place
    position = f"{place.file}:{place.line}"
    yield fitted(f"  {position} {place_reach.function}".rstrip())
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
    """Return the line, cut to that many columns if it has more; ``...`` stands for the rest."""
    if len(line) <= width:
        return line
    return f"{line[: width - 4]} ..."
