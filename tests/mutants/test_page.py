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


def rows_of(section: str) -> list[list[str]]:
    """Return the rows of links in the table of a section of docs/mutants.md, as their columns."""
    page = (Path(__file__).parents[2] / "docs" / "mutants.md").read_text(encoding="utf-8")
    _, _, rest = page.partition(f"## {section}\n")
    text, _, _ = rest.partition("\n## ")
    return [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| [")]


def test_the_page_says_by_which_check_each_bug_of_an_axis_is_caught() -> None:
    tests = Path(__file__).parents[1]
    twins = "\n\n\n".join(path.read_text(encoding="utf-8") for path in (tests / "twins").glob("twins_*.py"))
    rows = rows_of("Bugs of parallel axes")
    assert len(rows) == 10
    for _, how, check in rows:
        for name in re.findall(r"mutant `(.+?)`", how):
            assert {f"`{sighting.check}`" for sighting in SIGHTINGS[name]} == {check}
        for name in re.findall(r"twin `(.+?)`", how):
            declared = [block for block in twins.split("\n\n\n") if f"class {name}(" in block]
            assert any(re.search(rf"@twin\(\s*\"{check[1:-1]}\"", decorator) for decorator in declared), name


@pytest.mark.parametrize(
    ("section", "count"),
    [
        ("Fixes that nobody chose", 27),
        ("A second draw of fixes", 26),
        ("A third draw of fixes", 24),
        ("A fourth draw of fixes", 12),
        ("A fifth draw of fixes", 10),
    ],
)
def test_the_page_says_of_each_fix_that_nobody_chose_what_sees_it_or_why_nothing_does(section: str, count: int) -> None:
    rows = rows_of(section)
    assert len(rows) == count
    for link, _, how, check in rows:
        shown, _, address = link.strip("[)").partition("](")
        assert address.endswith((f"/pull/{shown.rpartition('#')[2]}", f"...v{shown.rpartition(' ')[2]}"))
        if how.startswith("not seen: "):
            assert check == "-"
            continue
        (name,) = re.findall(r"mutant `(.+?)`", how)
        assert address in BY_ID[name].upstream
        assert {f"`{sighting.check}`" for sighting in SIGHTINGS[name]} == {check}
        needs_driver = all(":" in sighting.driver for sighting in SIGHTINGS[name])
        assert how.endswith(", driver") == needs_driver
