"""The command ``distcompat reach``: shows which branches of the libraries the test cells execute.

Its input is a *map*, the file that ``pytest --distcompat-reach FILE`` wrote: for each function and
branch of the installed libraries the *cells* (test configurations, such as ``fsdp2-fp32-w2``) that
execute it. The command line calls ``add`` by the entry point group ``pytest_distcompat.commands``,
and ``_reach`` with the parsed options. It reads the maps, asks other modules of this package for
lines of text, as the options say, writes the files that they name, and prints the lines.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_distcompat.cli.output import named_in_errors, write
from pytest_distcompat.excerpt import visible
from pytest_distcompat.failures import UsageProblem

if TYPE_CHECKING:
    from pytest_distcompat.ext.reach.changed import PlaceReach
    from pytest_distcompat.ext.reach.map import ReachMap


def add(commands: Any) -> None:
    """Add the subcommand; ``commands`` is what argparse's ``add_subparsers`` returned."""
    parser = commands.add_parser(
        "reach",
        help="which branches of the stack the cells execute, and which none does",
        description="Show the map that pytest wrote with --distcompat-reach FILE. "
        "Several files, of shards, are one map.",
    )
    parser.add_argument(
        "files", type=Path, nargs="+", metavar="FILE", help="a map; that of each shard"
    )
    parser.add_argument(
        "--library", metavar="NAME", help="only this library, with all its functions and branches"
    )
    parser.add_argument(
        "--cell",
        metavar="CELL",
        help="only what these cells execute: an id or a pattern (fsdp2-*, accelerate/*)",
    )
    parser.add_argument(
        "--missing", action="store_true", help="list the branches that no cell reaches"
    )
    parser.add_argument(
        "--compare",
        type=Path,
        metavar="EARLIER",
        help="the map of an earlier release: list new branches that no cell reaches",
    )
    parser.add_argument(
        "--changed",
        metavar="PACKAGE@OLD_DIR..NEW_DIR",
        help="list the cells that execute what differs in these two copies of a package, "
        "of which the map has the old one; or PACKAGE@FILE.diff",
    )
    parser.add_argument(
        "--select",
        type=Path,
        metavar="FILE",
        help="write the cells of --changed there, for pytest in the order to run them",
    )
    parser.add_argument(
        "--cells-per-place",
        type=int,
        metavar="N",
        help="select only so many cells that execute each changed place (default: all)",
    )
    parser.add_argument(
        "--values",
        type=Path,
        nargs=2,
        metavar=("LAST.json", "TODAY.json"),
        help="with --changed or --compare: of the cells whose values differ in these reports, "
        "the functions that do",
    )
    parser.add_argument("--html", type=Path, metavar="PAGE", help="write a page of the map too")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="write the map of all files into one"
    )
    parser.set_defaults(call=_reach)


def _reach(options: argparse.Namespace) -> int:
    """Write the files that the options name, print what they ask for, and return 0."""
    from pytest_distcompat.ext.reach.page import page
    from pytest_distcompat.ext.reach.store import write_map

    reach_map = _selected(options)
    # All lines are made before a file is written: a mistake in the options raises here.
    lines = list(_lines(options, reach_map))
    # All files are written before a line is printed: a reader such as ``head`` closes the pipe, and
    # the next line would end this process.
    if options.output:
        with named_in_errors(options.output):
            write_map(options.output, reach_map)
        lines.append(f"written: {options.output}")
    if options.html:
        write(options.html, page(reach_map))
        lines.append(f"written: {options.html}")
    for line in lines:
        print(visible(line))
    return 0


def _selected(options: argparse.Namespace) -> ReachMap:
    """Return the merged map of all files, without libraries and cells that are not asked for."""
    from pytest_distcompat.ext.reach.store import read_map

    first, *others = options.files
    reach_map = read_map(first)
    for path in others:
        try:
            reach_map.merge(read_map(path))
        except ValueError as problem:
            raise UsageProblem(f"{first} and {path}: {problem}") from None
    if options.library:
        if options.library not in reach_map.libraries():
            known = ", ".join(reach_map.libraries())
            raise UsageProblem(
                f"--library {options.library}: it is not in the map. Known: {known}."
            )
        _keep_library(reach_map, options.library)
    if options.cell:
        cells = sorted({context.cell for context in reach_map.contexts()})
        reach_map = reach_map.only(options.cell)
        if not reach_map.contexts():
            names = ", ".join(cells)
            raise UsageProblem(
                f"--cell {options.cell}: none of the {len(cells)} cells in the map: {names}."
            )
    return reach_map


def _keep_library(reach_map: ReachMap, library: str) -> None:
    """Remove the files of all other libraries from the map."""
    for file_id in list(reach_map.files):
        if file_id.library != library:
            del reach_map.files[file_id]
            reach_map.executed.pop(file_id, None)


def _lines(options: argparse.Namespace, reach_map: ReachMap) -> Iterator[str]:
    """Yield the lines of the view that the options ask for; without one, the overview."""
    from pytest_distcompat.ext.reach.compare import compare
    from pytest_distcompat.ext.reach.store import read_map
    from pytest_distcompat.ext.reach.text import functions, missing, overview, unreached

    if options.values:
        yield from _value_lines(options, reach_map)
    elif options.changed:
        yield from _changed_lines(options, reach_map)
    elif options.compare:
        comparison = compare(read_map(options.compare), reach_map)
        yield from missing(comparison.unreached, "new branches that no cell reaches")
        yield ""
        yield f"new branches that some cell reaches: {len(comparison.reached)}"
        yield ""
        yield from missing(
            comparison.lost,
            "branches that a cell of the earlier release reaches, and none of this one",
        )
    elif options.missing:
        branches = unreached(reach_map, reach_map.libraries())
        yield from missing(branches, "branches that no cell reaches")
    elif options.library:
        yield from functions(reach_map, options.library)
    else:
        yield from overview(reach_map)


def _value_lines(options: argparse.Namespace, reach_map: ReachMap) -> Iterator[str]:
    """Yield the lines about the cells whose values, such as losses, differ between two reports.

    The lines of a cell say what may be the cause: the changed places that it executes
    (``--changed``), and the functions of which it executes something else than in the earlier map
    (``--compare``).
    """
    from pytest_distcompat.ext.reach.changed import reached_places
    from pytest_distcompat.ext.reach.differences import difference_lines
    from pytest_distcompat.ext.reach.diffs import read_change
    from pytest_distcompat.ext.reach.store import read_map
    from pytest_distcompat.report.document import Report
    from pytest_distcompat.report.values import value_changes

    if not options.changed and not options.compare:
        raise UsageProblem(
            "--values needs what has changed: "
            "--changed PACKAGE@OLD_DIR..NEW_DIR, or --compare EARLIER"
        )
    before, after = options.values
    changes = value_changes(Report.read(before), Report.read(after))
    earlier: ReachMap | None = None
    if options.compare:
        earlier = read_map(options.compare)
    places: list[PlaceReach] = []
    if options.changed:
        _, changed_places = read_change(options.changed)
        places = reached_places(reach_map, changed_places)
    cells = {(change.driver, change.cell) for change in changes}
    yield f"cells whose values differ: {len(cells)}"
    yield from difference_lines(changes, earlier, reach_map, places)


def _changed_lines(options: argparse.Namespace, reach_map: ReachMap) -> Iterator[str]:
    """Yield the lines about a change of a library; ``--select`` also writes the cells to run."""
    from pytest_distcompat.ext.reach.changed import reached_places
    from pytest_distcompat.ext.reach.diffs import files_outside, old_release, read_change
    from pytest_distcompat.ext.reach.selection import check_release, file_lines, select, summary
    from pytest_distcompat.ext.reach.text import changed, changed_unexecuted

    # ``PACKAGE@OLD_DIR..NEW_DIR`` or ``PACKAGE@FILE.diff``.
    text = options.changed
    library, places = read_change(text)
    if library not in reach_map.libraries():
        known = ", ".join(reach_map.libraries())
        raise UsageProblem(f"--changed {text}: {library} is not in the map. Known: {known}.")
    # The map must be of the release of the old copy.
    check_release(reach_map, library, old_release(text))
    # Each place with the cells that execute it.
    reached = reached_places(reach_map, places)
    if options.select:
        yield from changed_unexecuted(reached)
    else:
        yield from changed(reached)
    outside = files_outside(text)
    if outside:
        yield f"changed files that no map has, since they are no training code: {len(outside)}"
    if options.select:
        selected = select(reach_map, reached, options.cells_per_place)
        lines = file_lines(text, selected, reach_map, options.cell)
        write(options.select, "\n".join(lines) + "\n")
        yield summary(selected)
