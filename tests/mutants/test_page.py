"""The site names every mutant and where it is seen."""

from __future__ import annotations

from pathlib import Path

import pytest
from mutants.catalog import BY_ID
from mutants.sightings import SIGHTINGS
from tests.cli.generated import BUILT

PAGE = BUILT["mutants"]()


@pytest.mark.parametrize("name", BY_ID)
def test_the_page_names_the_cell_and_check_of_a_mutant(name: str) -> None:
    (row,) = (line for line in PAGE.splitlines() if line.startswith(f"- [{name}]("))
    assert SIGHTINGS[name]
    for sighting in SIGHTINGS[name]:
        assert f"{sighting.driver} `{sighting.cell}:{sighting.check}`" in row


def test_the_readme_has_the_number_of_mutants() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    assert f"| {len(BY_ID)} real upstream bugs" in readme
