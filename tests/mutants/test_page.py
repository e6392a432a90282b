"""The site names every mutant and where it is seen."""

from __future__ import annotations

import re
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


def test_the_page_says_by_which_check_each_bug_of_an_axis_is_caught() -> None:
    tests = Path(__file__).parents[1]
    lines = (tests.parent / "docs" / "mutants.md").read_text(encoding="utf-8").splitlines()
    twins = "\n\n\n".join(path.read_text(encoding="utf-8") for path in (tests / "twins").glob("twins_*.py"))
    rows = [line.strip("| ").split(" | ") for line in lines if re.match(r"\| \[\w+#\d+\]", line)]
    assert len(rows) == 10
    for _, how, check in rows:
        for name in re.findall(r"mutant `(.+?)`", how):
            assert {f"`{sighting.check}`" for sighting in SIGHTINGS[name]} == {check}
        for name in re.findall(r"twin `(.+?)`", how):
            declared = [block for block in twins.split("\n\n\n") if f"class {name}(" in block]
            assert any(re.search(rf"@twin\(\s*\"{check[1:-1]}\"", decorator) for decorator in declared), name
