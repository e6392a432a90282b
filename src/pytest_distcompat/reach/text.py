"""A map as text, in lines of at most 100 columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from pytest_distcompat.reach.branches import Branch
from pytest_distcompat.reach.changed import PlaceReach, cells_by_specificity
from pytest_distcompat.reach.map import BranchReach, Context, Counts, FileReach, ReachMap

#: The columns of a terminal that lines fit in.
WIDTH = 100
#: How many cells a line names; it counts the others.
CELLS_NAMED = 2
#: The order of branches that no cell reaches.
ORDER = "public functions first, then those that read an argument or a setting"


def headline(found: ReachMap) -> str:
    """Return one line with the numbers of the whole map."""
    counts = Counts.total(found.coverage_of(file_id).counts() for file_id in found.files)
    contexts = found.contexts()
    cells = len({context.place for context in contexts})
    drivers = len({context.driver for context in contexts})
    reached = f"{counts.reached_branches} of {counts.branches} branches ({counts.percent:.1f} %)"
    return f"{reached} are executed by {_counted(cells, 'cell')} of {_counted(drivers, 'driver')}"


def _counted(number: int, name: str) -> str:
    return f"{number} {name}" if number == 1 else f"{number} {name}s"


def overview(found: ReachMap) -> Iterator[str]:
    """Yield the lines about each library, then about each of its files."""
    yield headline(found)
    tools = [f"{name} {found.versions[name]}" for name in ("python", "coverage") if found.versions.get(name)]
    if tools:
        yield f"measured by {', '.join(tools)}"
    yield ""
    yield from library_table(found)
    for library in found.libraries():
        yield ""
        yield titled(found, library)
        yield from file_table(found, library)


def titled(found: ReachMap, library: str) -> str:
    """Return a library with its release."""
    return fitted(f"{library} {found.versions.get(library, '')}".rstrip())


def library_table(found: ReachMap) -> Iterator[str]:
    """Yield a line for each library."""
    yield _row("library", "files", "functions", "branches")
    for library in found.libraries():
        yield _numbers(titled(found, library), counts_of(found, library), files=True)


def file_table(found: ReachMap, library: str) -> Iterator[str]:
    """Yield a line for each file of a library."""
    yield _row("file", "", "functions", "branches")
    for file_id in found.files:
        # Many files define nothing but names.
        if file_id.library == library and found.files[file_id].functions:
            yield _numbers(f"  {file_id.path}", found.coverage_of(file_id).counts(), files=False)


def counts_of(found: ReachMap, library: str) -> Counts:
    """Return the numbers of a library."""
    return Counts.total(found.coverage_of(one).counts() for one in found.files if one.library == library)


def _row(*columns: str) -> str:
    name, files, functions, branches = columns
    return f"{fitted(name, 46):46} {files:>12} {functions:>14} {branches:>24}"


def _numbers(name: str, counts: Counts, *, files: bool) -> str:
    return _row(
        name,
        f"{counts.reached_files} of {counts.files}" if files else "",
        f"{counts.reached_functions} of {counts.functions}",
        f"{counts.reached_branches} of {counts.branches}, {counts.percent:5.1f} %",
    )


def functions(found: ReachMap, library: str) -> Iterator[str]:
    """Yield the lines about all functions and branches of a library that some cell executes, and those that none does."""
    yield titled(found, library)
    for file_id in found.files:
        if file_id.library == library:
            yield from _functions_of_file(found.coverage_of(file_id))


def _functions_of_file(file: FileReach) -> Iterator[str]:
    counts = file.counts()
    if not counts.functions:
        return
    yield ""
    yield fitted(f"{file.file.id}: {counts.reached_branches} of {counts.branches} branches")
    for found in sorted(file.functions(), key=lambda one: not one.function.public):
        reached = sum(bool(one.contexts) for one in found.branches)
        parts = [f"{reached} of {len(found.branches)} branches"] if found.branches else []
        yield fitted(f"  {found.function.name}: {', '.join([*parts, cells_text(found.contexts)])}")
        # Of a function that nobody executes the branches are all alike.
        for branch in found.branches if found.contexts else ():
            yield fitted(f"    {_branch_text(branch.branch)}")
            yield fitted(f"        {cells_text(branch.contexts)}")


def _branch_text(branch: Branch) -> str:
    return f"{branch.arrow:14}  {branch.text}"


def cells_text(contexts: Sequence[Context]) -> str:
    """Return how many cells there are, with some of them, and the actions; ``no cell`` if there are none."""
    if not contexts:
        return "no cell"
    places = list(dict.fromkeys(context.place for context in contexts))
    actions = list(dict.fromkeys(context.action for context in contexts))
    further = [", ..."] if len(places) > CELLS_NAMED else []
    return (
        f"{_counted(len(places), 'cell')} in {' '.join(actions)}: {', '.join(places[:CELLS_NAMED])}{''.join(further)}"
    )


def missing(branches: Iterable[BranchReach], title: str) -> Iterator[str]:
    """Yield the lines about branches that no cell reaches, what users are likely to run into first.

    Args:
        branches: The branches.
        title: What they are, as a line that ends with their number.
    """
    ordered = sorted(branches, key=lambda one: one.order)
    yield fitted(f"{title}: {len(ordered)}")
    yield ORDER
    place = None
    for one in ordered:
        if place != (one.branch.rank, one.file, one.branch.function):
            place = (one.branch.rank, one.file, one.branch.function)
            kind = one.branch.rank.name.lower().replace("_", ", ")
            yield fitted(f"{one.file} {one.branch.function} ({kind})")
        yield fitted(f"    {_branch_text(one.branch)}")


def changed(reached: Sequence[PlaceReach]) -> Iterator[str]:
    """Yield the lines about a change: the cells that execute its places, the places, and those that no cell executes."""
    executed = [one for one in reached if one.contexts]
    files = len({one.place.file for one in reached})
    yield f"{_counted(len(reached), 'changed place')} in {_counted(files, 'file')}; cells execute {len(executed)}"
    yield ""
    yield "cells, those first whose places few others execute"
    for cell in cells_by_specificity(reached):
        alone = f", {cell.alone} of them alone" if cell.alone else ""
        yield fitted(f"  {cell.cell}: {_counted(cell.places, 'place')}{alone}")
    yield ""
    yield "places that cells execute, first those that few execute"
    for one in sorted(executed, key=lambda one: len(one.cells)):
        yield from _place_lines(one)
        yield fitted(f"        {cells_text(one.contexts)}")
    yield ""
    unexecuted = [one for one in reached if one.function and not one.contexts]
    new = [one for one in reached if one.place.defines]
    for title, places in (("places that no cell executes", unexecuted), ("new functions and classes", new)):
        yield f"{title}: {len(places)}"
        for one in places:
            yield from _place_lines(one)
        yield ""
    yield f"places outside functions, which run on import: {sum(one.on_import for one in reached)}"


def _place_lines(one: PlaceReach) -> Iterator[str]:
    yield fitted(f"  {one.place.file}:{one.place.line} {one.function}".rstrip())
    yield fitted(f"      {one.place.text}")


def unreached(found: ReachMap, libraries: Sequence[str]) -> Iterator[BranchReach]:
    """Yield the branches of these libraries that no cell reaches."""
    for file_id in found.files:
        if file_id.library in libraries:
            for one in found.coverage_of(file_id).branches():
                if not one.contexts:
                    yield one


def fitted(line: str, width: int = WIDTH) -> str:
    """Return the line, cut if it has more columns."""
    return line if len(line) <= width else f"{line[: width - 4]} ..."
