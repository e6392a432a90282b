"""The built-in suite, with no test of its own for any of them, sees upstream bugs that are brought back, and nothing else.

Each mutant is an installed package in a copy with one fix taken out (``mutation.py``); ranks import the copy.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from mutants.catalog import BY_ID
from mutants.mutation import STAND_IN, mutated_copy
from mutants.sightings import SIGHTINGS
from mutants.stack import Stack, stack

if TYPE_CHECKING:
    from mutants.mutation import Sighting

pytestmark = pytest.mark.spawn

ALL = [(mutant, sighting) for mutant, sightings in SIGHTINGS.items() for sighting in sightings]


def cells(sightings: tuple[Sighting, ...]) -> tuple[tuple[str, str], ...]:
    return tuple((sighting.driver, sighting.cell) for sighting in sightings)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The installed stack; with the stand-in that one mutant needs, which nobody else imports."""
    wanted = cells(tuple(sighting for _, sighting in ALL))
    with stack(tmp_path_factory.mktemp("sound"), (STAND_IN,), wanted) as environment:
        yield environment


# A mutated copy has a fork server of its own, 15 s of a core.
@pytest.mark.nightly
@pytest.mark.parametrize("name", SIGHTINGS)
def test_the_suite_finds_the_bug(name: str, sound: Stack, tmp_path: Path) -> None:
    mutant, sightings = BY_ID[name], SIGHTINGS[name]
    # First, so that its ranks are warm before anything of the mutant's is on the path.
    for sighting in sightings:
        verdict = sound.verdict(sighting.driver, sighting.cell, sighting.check)
        assert verdict.status in {"passed", "known", "refused"}, f"the sound stack: {verdict}"
    path = (mutated_copy(mutant, tmp_path / "copy"), *((STAND_IN,) if mutant.stand_in else ()))
    with stack(tmp_path / "runs", path, cells(sightings)) as mutated:
        for sighting in sightings:
            verdict = mutated.verdict(sighting.driver, sighting.cell, sighting.check)
            assert verdict.status in {"failed", "late", "crashed", "hung"}, f"not seen: {sighting}: {verdict}"
            assert re.search(sighting.match, verdict.message), verdict.message
