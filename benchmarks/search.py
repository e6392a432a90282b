"""What guidance gives ``distcompat search``: new branches after so many candidates, guided and drawn blindly.

``python benchmarks/search.py --map reach.sqlite [--driver accelerate] [--candidates 100] [--seeds 0 1]`` runs both with an
empty corpus, one after the other. ``--guided FILE ... --blind FILE ...`` reads the states of searches that have run instead.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from machine import PACKAGES, measured_on  # type: ignore[import-not-found] # a script imports from its own directory

#: At so many candidates the table has a row: each of this many parts of all.
PARTS = 6


@dataclass(frozen=True)
class Curve:
    """New branches after each candidate of a search, and its seconds for a candidate."""

    branches: tuple[int, ...]
    seconds: float

    @classmethod
    def read(cls, path: Path) -> Curve:
        """Return the curve of a search's state."""
        state = json.loads(path.read_text(encoding="utf-8"))
        tried = list(state["tried"].values())
        return cls(tuple(itertools.accumulate(tried)), state["seconds"] / len(tried))


def searched(given: argparse.Namespace, seed: int, directory: Path, *, blind: bool) -> Curve:
    """Run a search and return its curve."""
    corpus = directory / "corpus.json"
    corpus.write_text("[]", encoding="utf-8")
    state = directory / f"{seed}-{blind}.json"
    command = [
        sys.executable,
        "-m",
        "pytest_distcompat.cli",
        "search",
        "--map",
        str(given.map),
        "--seed",
        str(seed),
    ]
    command += [
        "--candidates",
        str(given.candidates),
        "--state",
        str(state),
        "--corpus",
        str(corpus),
    ]
    for driver in given.driver or ():
        command += ["--driver", driver]
    if blind:
        command.append("--blind")
    # It ends with 1 where it finds something.
    subprocess.run(command, check=False, stdout=subprocess.DEVNULL)
    return Curve.read(state)


def row(count: int, guided: Sequence[Curve], blind: Sequence[Curve]) -> str:
    """Return a line of the table: the medians after so many candidates."""
    cells = [str(count)]
    for curves in (guided, blind):
        cells.append(f"{statistics.median(curve.branches[count - 1] for curve in curves):g}")
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--map", type=Path)
    parser.add_argument("--driver", action="append")
    parser.add_argument("--candidates", type=int, default=100)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--guided", type=Path, nargs="+")
    parser.add_argument("--blind", type=Path, nargs="+")
    given = parser.parse_args()
    if given.guided and given.blind:
        guided = [Curve.read(path) for path in given.guided]
        blind = [Curve.read(path) for path in given.blind]
    elif given.map:
        with tempfile.TemporaryDirectory() as name:
            guided = [searched(given, seed, Path(name), blind=False) for seed in given.seeds]
            blind = [searched(given, seed, Path(name), blind=True) for seed in given.seeds]
    else:
        parser.error("expected --map, or --guided and --blind")
    count = min(len(curve.branches) for curve in (*guided, *blind))
    print(
        f"{measured_on(*PACKAGES, 'coverage')}; medians of {len(guided)} and {len(blind)} searches\n"
    )
    print("| candidates | new branches, guided | blind |\n| --- | --- | --- |")
    for part in range(1, PARTS + 1):
        print(row(count * part // PARTS, guided, blind))
    for title, curves in (("guided", guided), ("blind", blind)):
        print(
            f"\n{title}: {statistics.median(curve.seconds for curve in curves):.1f} s a candidate"
        )


if __name__ == "__main__":
    main()
