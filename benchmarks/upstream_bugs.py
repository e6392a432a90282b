"""Does a profile of the built-in suite see each upstream bug that is brought back?

``python benchmarks/upstream_bugs.py --profile pairwise``: for each mutant (tests/mutants) the cells of the profile are tried,
those most like the one where it is known to be seen first, until a check fails there that holds on the sound stack.
"""

from __future__ import annotations

import argparse
import functools
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from machine import PACKAGES, expect, measured_on  # type: ignore[import-not-found] # a script imports from its own directory

TESTS = Path(__file__).parents[1] / "tests"
sys.path.append(str(TESTS))

from mutants import profiled  # noqa: E402
from mutants.catalog import BY_ID  # noqa: E402 - the tests' own modules, by the names that ranks know them by
from mutants.mutation import STAND_IN, Sighting, mutated_copy  # noqa: E402
from mutants.sightings import SIGHTINGS  # noqa: E402
from mutants.stack import Stack, stack  # noqa: E402

from pytest_distcompat import profiles  # noqa: E402
from pytest_distcompat.cell import Cell  # noqa: E402
from pytest_distcompat.checks import CHECKS  # noqa: E402
from pytest_distcompat.drivers import find_driver  # noqa: E402

#: What the ranks of the sound stack import.
ANY = [(driver, "ddp-fp32-w2") for driver in profiled.MATRICES]
GOOD = {"passed", "known", "refused"}


def cells(profile: str, driver: str) -> list[Cell]:
    """Those of the profile that can be run here."""
    kind = find_driver(driver)
    return [
        cell for cell in profiled.cells(profile, driver) if not kind.unsupported_reason(cell, "cpu")
    ]


def alike(wanted: Cell, cell: Cell) -> tuple[int, ...]:
    """Sorts what is most like the wanted cell first; compiled by inductor last, for it takes long."""
    has, wants = set(cell.options), set(wanted.options)
    differ = (
        cell.strategy != wanted.strategy,
        len(wants - has),
        cell.precision != wanted.precision,
        len(has - wants),
    )
    return (int(cell.option("compile") is True), *map(int, differ))


def seen(
    sound: Stack, mutated: Stack, sighting: Sighting, among: list[Cell]
) -> Iterator[tuple[str, str]]:
    """(cell, check) that fails on the mutant and not on the sound stack."""
    kind = find_driver(sighting.driver)
    for cell in among:
        names = [
            name
            for name, check in CHECKS.by_name.items()
            if not check.limit and not check.not_applicable(cell, kind)
        ]
        for name in sorted(
            names, key=lambda name: (name != sighting.check, CHECKS.get(name).costly)
        ):
            wrong = mutated.verdict(sighting.driver, cell.id, name).status not in GOOD
            if wrong and sound.verdict(sighting.driver, cell.id, name).status in GOOD:
                yield cell.id, name


def look(sound: Stack, name: str, sighting: Sighting, among: list[Cell]) -> tuple[str, str] | None:
    """The first place where the mutant is seen."""
    # Before anything of the mutant's is on the path.
    sound.verdict(sighting.driver, sighting.cell, sighting.check)
    with tempfile.TemporaryDirectory() as place:
        path = (mutated_copy(BY_ID[name], Path(place) / "copy"), STAND_IN)
        with stack(Path(place) / "runs", path, ((sighting.driver, sighting.cell),)) as mutated:
            return next(seen(sound, mutated, sighting, among), None)


def main() -> None:
    """Print a row for each mutant."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", choices=list(profiles.all_profiles()), default="pairwise")
    parser.add_argument("--tries", type=int, default=8, help="so many cells a mutant at most")
    parser.add_argument("mutants", nargs="*", default=list(SIGHTINGS))
    options = parser.parse_args()
    expect(parser, options.mutants, SIGHTINGS)
    print(f"{measured_on(*PACKAGES)}\n")
    print("| bug | driver | seen in |\n| --- | --- | --- |")
    missed = 0
    with tempfile.TemporaryDirectory() as home, stack(Path(home), (STAND_IN,), tuple(ANY)) as sound:
        for name in options.mutants:
            (sighting, *_) = SIGHTINGS[name]
            key = functools.partial(alike, Cell.parse(sighting.cell))
            among = sorted(cells(options.profile, sighting.driver), key=key)[: options.tries]
            found = look(sound, name, sighting, among)
            missed += found is None
            print(
                f"| {name} | {sighting.driver} | {':'.join(found) if found else 'NOT SEEN'} |",
                flush=True,
            )
    print(
        f"\n{len(options.mutants) - missed} of {len(options.mutants)} seen in the profile {options.profile}"
    )


if __name__ == "__main__":
    main()
