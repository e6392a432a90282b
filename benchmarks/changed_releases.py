"""Does ``distcompat releases --changed`` see what all cells see, and in what part of their time?

``python benchmarks/changed_releases.py --reach smoke.sqlite --kept DIRECTORY accelerate@1.14.0 deepspeed@0.19.7``: for each
release the profile runs with it, all cells of the drivers that use the library; then the cells that ``--changed`` selects, one
for each changed place. The map is that of the installed stack. What has been measured is kept in the directory, so that a run
that was interrupted goes on. The sessions of a release follow each other, so that their ratio holds on a busy machine too.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import time
from dataclasses import dataclass
from pathlib import Path

# A script imports from its own directory.
from changed_suite import run_suite  # type: ignore[import-not-found]
from machine import PACKAGES, measured_on  # type: ignore[import-not-found]

from pytest_distcompat.ext.upstream.changed import (
    SELECTING_PLUGIN,
    SELECTION,
    Change,
    read_change,
    select_cells,
)
from pytest_distcompat.ext.upstream.selected import read_selection
from pytest_distcompat.ext.upstream.side_by_side import file_name
from pytest_distcompat.report.causes import causes
from pytest_distcompat.report.document import Report

#: The built-in drivers whose trainings use a library.
DRIVERS = {"accelerate": "accelerate", "deepspeed": "deepspeed", "transformers": "trainer"}


@dataclass(frozen=True)
class Session:
    """A session with a release: its seconds, and what was red."""

    seconds: float
    report: Report

    @property
    def red(self) -> set[str]:
        """The node ids of red verdicts."""
        return {result.nodeid for result in self.report.results if result.red}

    @property
    def causes(self) -> set[tuple[str, str]]:
        """The causes of red verdicts."""
        return {cause.key for cause in causes(self.report.results)}

    def seconds_of_runs(self, cells: set[str] | None = None) -> float:
        """The seconds of all runs, or of those that checks of these cells read."""
        ids = {
            run
            for row in self.report.rows
            if cells is None or f"{row.driver}/{row.cell}" in cells
            for run in row.runs
        }
        return sum(float(run["seconds"]) for run in self.report.runs if run["id"] in ids)

    @property
    def ran(self) -> int:
        """How many verdicts there are, those of skipped cells aside."""
        return len([result for result in self.report.results if result.status != "skipped"])


def session(name: str, change: Change, kept: Path, *arguments: str) -> Session:
    """Run the built-in suite with a release, unless that has been done."""
    report, seconds = kept / f"{name}.json", kept / f"{name}.seconds"
    if not seconds.is_file():
        began = time.perf_counter()
        run_suite(change.target, report, *arguments)
        seconds.write_text(json.dumps(time.perf_counter() - began), encoding="utf-8")
    return Session(json.loads(seconds.read_text(encoding="utf-8")), Report.read(report))


def row(release: str, given: argparse.Namespace) -> str:
    """Measure a release; return its line of the table."""
    library, _, version = release.partition("@")
    change = read_change(f"{library}@installed..{version}", given.kept)
    name = file_name(change.name)
    selection, first = given.kept / f"{name}.all-cells", given.kept / f"{name}.first-cells"
    for path, cells_per_place in ((selection, None), (first, "1")):
        # It prints the places that no cell executes.
        with contextlib.redirect_stdout(io.StringIO()):
            select_cells(
                change,
                given.reach,
                path,
                cell=f"{DRIVERS[library]}/*",
                cells_per_place=cells_per_place,
            )
    profile = [f"--distcompat-profile={given.profile}", f"--distcompat-drivers={DRIVERS[library]}"]
    selected = session(
        f"{name}-first",
        change,
        given.kept,
        *profile,
        "-p",
        SELECTING_PLUGIN,
        f"{SELECTION}={first}",
    )
    whole = session(f"{name}-whole", change, given.kept, *profile)
    chosen = read_selection(selection)
    cells = {
        f"{row.driver}/{row.cell}"
        for row in whole.report.rows
        if chosen.chosen(f"{row.driver}/{row.cell}")
    }
    in_selection = {
        result.nodeid
        for result in whole.report.results
        if f"{result.driver}/{result.cell}" in cells
    }
    whole_runs, selected_runs = whole.seconds_of_runs(), selected.seconds_of_runs()
    figures = (
        f"{library} {version}",
        whole.ran,
        len(whole.red),
        len(whole.causes),
        f"{whole.seconds:.0f} ({whole_runs:.0f})",
        len(whole.red & in_selection),
        f"{whole.seconds_of_runs(cells) / whole_runs:.2f}",
        selected.ran,
        len(selected.red),
        len(selected.causes & whole.causes),
        f"{selected.seconds:.0f} ({selected_runs:.0f})",
        f"{selected.seconds / whole.seconds:.2f} ({selected_runs / whole_runs:.2f})",
    )
    return f"| {' | '.join(map(str, figures))} |"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("releases", nargs="+", metavar="LIBRARY@VERSION")
    parser.add_argument("--reach", type=Path, action="append", required=True, metavar="FILE")
    parser.add_argument("--kept", type=Path, required=True, metavar="DIRECTORY")
    parser.add_argument("--profile", default="smoke")
    given = parser.parse_args()
    given.kept = given.kept.resolve()
    print(f"{measured_on(*PACKAGES)}; profile {given.profile}\n")
    print("s: of the session (of its runs)\n")
    heads = ["release", "all cells: verdicts", "red", "causes", "s"]
    heads += ["in all selected cells: red", "part of the runs' s"]
    heads += ["one cell for each place: verdicts", "red", "causes", "s", "part"]
    print(f"| {' | '.join(heads)} |")
    print(f"|{' --- |' * len(heads)}", flush=True)
    for release in given.releases:
        print(row(release, given), flush=True)


if __name__ == "__main__":
    main()
