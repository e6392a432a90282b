"""What does each cell of a profile add to the branches that the others execute, and what does it cost?

``python benchmarks/profile_cells.py reach.sqlite report.json``: map and report are of one session with ``--distcompat-reach``
and ``--distcompat-report``. Cells are listed from the least branches of their own a second: those that add none come first,
and may go. A cell's own branches are those that no other cell of the session executes, whatever its driver.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_distcompat.ext.reach.branches import numbers_of
from pytest_distcompat.ext.reach.map import ReachMap
from pytest_distcompat.ext.reach.store import read_map

#: One branch: the number of its file in the map, and its number in the file.
Branch = tuple[int, int]


@dataclass(frozen=True)
class CellValue:
    """What one cell is worth.

    Attributes:
        place: Driver and cell.
        branches: How many branches it executes.
        own: How many of them no other cell executes.
        seconds: The seconds of its tests, those that waited for a run that tests share among them.
        verdicts: How many tests it has.
    """

    place: str
    branches: int
    own: int
    seconds: float
    verdicts: int

    @property
    def own_per_second(self) -> float:
        """Return the branches of its own a second."""
        return self.own / max(self.seconds, 0.1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("map", type=Path)
    parser.add_argument("report", type=Path)
    options = parser.parse_args()
    branches_by_cell = executed_branches(read_map(options.map))
    values = cell_values(branches_by_cell, json.loads(options.report.read_text(encoding="utf-8")))
    values.sort(key=lambda value: (value.own_per_second, -value.seconds))
    print("| cell | branches | of its own | seconds | verdicts |")
    print("| --- | --- | --- | --- | --- |")
    for value in values:
        print(
            f"| {value.place} | {value.branches} | {value.own} | {value.seconds:.1f} | {value.verdicts} |"
        )


def executed_branches(reach_map: ReachMap) -> dict[str, set[Branch]]:
    """Return the branches that each cell executes, by driver and cell."""
    branches_by_cell: dict[str, set[Branch]] = {}
    for file_number, by_context in enumerate(reach_map.executed.values()):
        for context, executed in by_context.items():
            branches = branches_by_cell.setdefault(context.driver_and_cell, set())
            for branch in numbers_of(executed.branches):
                branches.add((file_number, branch))
    return branches_by_cell


def cell_values(
    branches_by_cell: dict[str, set[Branch]], report: dict[str, Any]
) -> list[CellValue]:
    """Return the value of each cell of a report."""
    cells_by_branch: Counter[Branch] = Counter()
    for branches in branches_by_cell.values():
        cells_by_branch.update(branches)
    seconds: dict[str, float] = defaultdict(float)
    verdicts: Counter[str] = Counter()
    for result in report["results"]:
        place = f"{result['driver']}/{result['cell']}"
        seconds[place] += float(result["seconds"] or 0)
        verdicts[place] += 1
    values = []
    for place, verdict_count in verdicts.items():
        branches = branches_by_cell.get(place, set())
        own = [branch for branch in branches if cells_by_branch[branch] == 1]
        values.append(CellValue(place, len(branches), len(own), seconds[place], verdict_count))
    return values


if __name__ == "__main__":
    main()
