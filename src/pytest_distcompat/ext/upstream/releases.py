"""``releases``: runs the same tests with several releases of a package and compares the results.

The command line calls ``add(commands)`` to add the subcommand, and ``_releases`` for
``distcompat releases``. There are three forms; behind ``--`` come the arguments of pytest:

- ``--release accelerate==1.12.0 --release accelerate==1.13.0 -- tests``: run pytest with each
  release, then with what is installed.
- ``--bisect accelerate==1.8.0..1.13.0 -- tests``: find the release that turned the tests red, or
  green (``bisect.py``).
- ``--changed accelerate@1.12.0..1.13.0 --reach FILE -- tests``: run with the new release only the
  cells, configurations under test, that execute a *place*, some lines, that it changes. The file is
  a map, recorded with the old release, of what each cell executes (``changed.py``,
  ``selected.py``).

Each release is installed into a directory of its own (``side_by_side.py``); the environment of the
installed packages stays as it is. A ``Run`` is a pytest session with one release, in a process of
its own (``_release_runs.py``). The result is a Markdown table: a column for each release, rows for
the counts of verdicts and for each cause of failure. *Red* verdicts are those that make a session
fail.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pytest_distcompat.cli.output import named_in_errors, write
from pytest_distcompat.ext.upstream._release_runs import Run, run_with, table
from pytest_distcompat.ext.upstream.bisect import bisect, releases_of
from pytest_distcompat.ext.upstream.changed import (
    EXPECTED,
    SELECTING_PLUGIN,
    SELECTION,
    read_change,
    select_cells,
)
from pytest_distcompat.ext.upstream.side_by_side import (
    environment,
    file_name,
    install,
    requirements,
)
from pytest_distcompat.failures import UsageProblem

#: The heading of the last column: the installed packages as they are.
INSTALLED = "installed"


def add(commands: Any) -> None:
    """Add the subcommand to the parser's.

    Args:
        commands: What ``ArgumentParser.add_subparsers`` has returned.
    """
    releases = commands.add_parser(
        "releases",
        help="the same tests with other releases of a package, side by side",
        usage=(
            "distcompat releases [-h] "
            "(--release PACKAGE==VERSION[,...] | --bisect PACKAGE==FIRST..LAST | "
            "--changed PACKAGE@FROM..TO --reach FILE [--cell CELL] [--limit TIME] "
            "[--cells-per-place N]) "
            "[--into DIRECTORY] [-o FILE.md] -- PYTEST-ARGUMENT ..."
        ),
        description=(
            "Run pytest with each release, then with what is installed, and list red verdicts by "
            "release. Exit code 0: nothing is red; 1: something is, or a run came to no report. "
            "With --bisect: find the release that turned the tests red, or green. "
            "Exit code 0: found. With --changed: run with the new release only the cells that "
            "execute what it changes."
        ),
    )
    _add_forms(releases)
    _add_options_of_changed(releases)
    releases.add_argument(
        "--into",
        type=Path,
        metavar="DIRECTORY",
        help=f"keep releases, reports and logs there ({_cache()})",
    )
    releases.add_argument(
        "-o", "--output", type=Path, metavar="FILE.md", help="write the table there too"
    )
    releases.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="PYTEST-ARGUMENT", help="of each run"
    )
    releases.set_defaults(call=_releases)


def _add_forms(releases: argparse.ArgumentParser) -> None:
    """Add the options of which the user must give one: what is run with which release."""
    which = releases.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "--release",
        action="append",
        metavar="PACKAGE==VERSION[,...]",
        help="installed beside what is there (pip install --target); may be given several times, "
        "the oldest first",
    )
    which.add_argument(
        "--bisect",
        metavar="PACKAGE==FIRST..LAST",
        help="halve the releases between these two; or the commits: PACKAGE @ git+URL@FIRST..LAST",
    )
    which.add_argument(
        "--changed", metavar="PACKAGE@FROM..TO", help=f"a change of a package: {EXPECTED}"
    )


def _add_options_of_changed(releases: argparse.ArgumentParser) -> None:
    """Add the options that go with ``--changed`` alone."""
    releases.add_argument(
        "--reach",
        action="append",
        type=Path,
        default=[],
        metavar="FILE",
        help="with --changed: the map of --distcompat-reach FILE with the old release; "
        "may be given several times",
    )
    releases.add_argument(
        "--limit",
        metavar="TIME",
        help="with --changed: start no further cell after this time (90s, 5m)",
    )
    releases.add_argument(
        "--cell",
        metavar="CELL",
        help="with --changed: only these cells of the map, a pattern (accelerate/*)",
    )
    releases.add_argument(
        "--cells-per-place",
        metavar="N",
        help="with --changed: only so many cells that execute each changed place",
    )


def _releases(options: argparse.Namespace) -> int:
    """Run the tests as the options say, print the table, and return the exit code."""
    # Raises for a text that is no release, before anything is installed.
    for release in options.release or ():
        requirements(release)
    directory = (options.into or _cache()).resolve()
    # An OSError becomes a UsageProblem that names the file.
    with named_in_errors():
        directory.mkdir(parents=True, exist_ok=True)
        if options.output is not None:
            # Whether it can be written shows before the sessions. This appends nothing, so an
            # existing page stays as it is.
            options.output.open("ab").close()
    arguments = options.arguments
    if arguments[:1] == ["--"]:
        arguments = arguments[1:]
    if options.changed:
        return _changed(options, directory, arguments)
    if options.bisect:
        return _bisect(options.bisect, directory, arguments, options.output)
    # Install all first: a missing release is reported before any session, which takes minutes.
    environments = {}
    for release in dict.fromkeys(options.release):
        environments[release] = environment(install(release, directory))
    environments[INSTALLED] = dict(os.environ)
    runs = []
    for release, variables in environments.items():
        run = run_with(release, variables, directory, arguments)
        runs.append(run)
        print(f"{release}: {run.summary}", flush=True)
    _write(runs, options.output)
    return int(not all(run.good for run in runs))


def _changed(options: argparse.Namespace, directory: Path, arguments: Sequence[str]) -> int:
    """Run the cells that execute what a release changes, with it; return the exit code.

    Args:
        options: The options of the command.
        directory: Where releases, reports and logs are kept.
        arguments: The arguments of pytest.
    """
    if not options.reach:
        raise UsageProblem(
            "--changed needs a map: --reach FILE, which pytest --distcompat-reach FILE writes"
        )
    change = read_change(options.changed, directory)
    selection = directory / f"{file_name(change.name)}.cells"
    any_selected = select_cells(
        change, options.reach, selection, cell=options.cell, cells_per_place=options.cells_per_place
    )
    if not any_selected:
        print("no cell executes what changes: nothing is run")
        return 0
    print(f"{change.name}: the cells are in {selection}\n", flush=True)
    # A pytest plugin that deselects all but the cells in the file, and its option.
    selecting = ["-p", SELECTING_PLUGIN, f"{SELECTION}={selection}"]
    if options.limit:
        # The cells run in the order of the file, in which the most useful ones come first.
        selecting.append(f"--distcompat-budget={options.limit}")
    variables = environment(change.target)
    run = run_with(change.name, variables, directory, [*arguments, *selecting])
    print(f"{change.name}: {run.summary}", flush=True)
    _write([run], options.output)
    return int(not run.good)


#: What ``Run.red`` says, in words.
_COLOURS = {True: "red", False: "green", None: "neither red nor green"}


def _bisect(releases: str, directory: Path, arguments: Sequence[str], page: Path | None) -> int:
    """Locate the release that changed the colour of the tests; return the exit code.

    Args:
        releases: A range, as ``releases_of`` reads it.
        directory: Where releases, reports and logs are kept.
        arguments: The arguments of pytest.
        page: Where the table is written too; None for nowhere.
    """
    ordered = releases_of(releases, directory)

    def run(release: str) -> Run:
        try:
            target = install(release, directory)
        except UsageProblem as error:  # one release of many that has no wheel for this Python
            return Run(release, report=None, problem=str(error))
        return run_with(release, environment(target), directory, arguments)

    runs = []
    # The first release, the last one, and then those between that are needed.
    for outcome in bisect(ordered, run, lambda run: run.red):
        runs.append(outcome)
        colour = _COLOURS[outcome.red]
        print(f"{outcome.release}: {colour}: {outcome.summary}", flush=True)
    # They were run from both ends inwards; the table has the oldest first.
    runs.sort(key=lambda run: ordered.index(run.release))
    _write(runs, page)
    change = _change(runs)
    if change is None:
        first = _colour_fact(runs[0])
        last = _colour_fact(runs[-1])
        print(f"\n{first}; {last}; expected one red and one green")
        return 1
    before, after = change
    colour = _COLOURS[after.red]
    # Releases between the two that are neither red nor green are named too: one of them may be the
    # first.
    facts = [f"the first {colour} one is {after.release}"]
    facts.append(_colour_fact(before))
    start = ordered.index(before.release) + 1
    end = ordered.index(after.release)
    facts += [f"{release} is {_COLOURS[None]}" for release in ordered[start:end]]
    text = "; ".join(facts)
    print(f"\n{text}")
    return 0


def _colour_fact(run: Run) -> str:
    """Return which colour a release has, as a clause."""
    return f"{run.release} is {_COLOURS[run.red]}"


def _change(runs: Sequence[Run]) -> tuple[Run, Run] | None:
    """Return the last run before the tests changed their colour, and the first after it.

    None if they did not change.
    """
    coloured = [run for run in runs if run.red is not None]
    for before, after in itertools.pairwise(coloured):
        if before.red != after.red:
            return before, after
    return None


def _write(runs: Sequence[Run], page: Path | None) -> None:
    """Print the table of runs, and write it to the page."""
    text = "\n".join(table(runs)) + "\n"
    print(f"\n{text}", end="")
    if page:
        write(page, text)


def _cache() -> Path:
    """Return the directory for releases, reports and logs, if the user names none."""
    # Compiled packages differ between Python versions.
    major, minor = sys.version_info[:2]
    python = f"{sys.implementation.name}-{major}.{minor}"
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "distcompat-releases" / python
