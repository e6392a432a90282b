"""A change of a library: its places, the cells that execute them, and the places that no cell executes."""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest

from pytest_distcompat.ext.reach.analysis import AnalysedFile
from pytest_distcompat.ext.reach.branches import Executed, bits_of
from pytest_distcompat.ext.reach.changed import cells_by_specificity, reached_places
from pytest_distcompat.ext.reach.diffs import ChangedPlace, changed_places, files_outside, places_of_diff, read_change
from pytest_distcompat.ext.reach.libraries import BY_NAME, FileId
from pytest_distcompat.ext.reach.map import Context, ReachMap
from pytest_distcompat.ext.reach.text import WIDTH, changed
from pytest_distcompat.failures import UsageProblem

ACCELERATE = BY_NAME["accelerate"]
FILE = FileId("accelerate", "accelerator.py")
OLD = '''"""Module."""


class Accelerator:
    def prepare(self, model, shard=False):
        """Prepare."""
        if shard:
            model = self.wrap(
                model,
                shard,
            )
        return model

    def save(self, model):
        # Save.
        state = model.state_dict()
        return state
'''
NEW = (
    OLD.replace('"""Prepare."""', '"""Prepare a model."""')
    .replace("                shard,\n", "                bool(shard),\n")
    .replace("# Save.", "# Save it.")
    .replace(
        "        return state\n",
        "        state.pop('x', None)\n        return state\n\n    def new(self):\n        return self\n",
    )
)
BUILD = Context("accelerate", "fsdp2-fp32-w2", "build")
DDP = Context("accelerate", "ddp-fp32-w2", "build")
SAVE = Context("accelerate", "ddp-fp32-w2", "save")


def line_of(text: str, source: str = OLD) -> int:
    """Return the number of the first line with this text."""
    lines = [line.strip() for line in source.splitlines()]
    return lines.index(text) + 1


def package(directory: Path, source: str) -> Path:
    modules = directory / "accelerate"
    modules.mkdir(parents=True)
    (modules / "__init__.py").touch()
    (modules / "accelerator.py").write_text(source, encoding="utf-8")
    return directory


def executed(*texts: str) -> Executed:
    """Return that the old release's lines with these texts were executed."""
    lines = [line_of(text) for text in texts]
    return Executed(bits_of(lines))


def changed_between(old: Path, new: Path) -> list[ChangedPlace]:
    """Return the places in which these copies of accelerate differ."""
    _, places = read_change(f"accelerate@{old}..{new}")
    return places


@pytest.fixture
def copies(tmp_path: Path) -> tuple[Path, Path]:
    return package(tmp_path / "old", OLD), package(tmp_path / "new", NEW)


@pytest.fixture
def reach_map(copies: tuple[Path, Path]) -> ReachMap:
    """FSDP2 executes the wrap; DDP prepares without it and saves."""
    file = AnalysedFile(copies[0] / "accelerate" / "accelerator.py", FILE).file
    reach_map = ReachMap({"accelerate": "1.0"}, {FILE: file})
    reach_map.add(FILE, BUILD, executed("if shard:", "model = self.wrap(", "return model"))
    reach_map.add(FILE, DDP, executed("if shard:", "return model"))
    reach_map.add(FILE, SAVE, executed("state = model.state_dict()", "return state"))
    return reach_map


def texts(places: list[ChangedPlace]) -> list[str]:
    return [place.text for place in places]


def test_two_copies_differ_in_code_and_not_in_comments_and_docstrings(copies: tuple[Path, Path]) -> None:
    places = changed_between(*copies)
    expected_texts = ["bool(shard),", "state.pop('x', None)", "def new(self):"]
    assert texts(places) == expected_texts
    assert [place.line for place in places] == [line_of(text, NEW) for text in expected_texts]
    # The package's own directory will do.
    old, new = copies
    change = read_change(f"accelerate@{old / 'accelerate'}..{new / 'accelerate'}")
    assert change == ("accelerate", places)


@pytest.mark.parametrize("context_lines", [0, 3])
def test_a_diff_says_the_same_whatever_it_shows_around(context_lines: int, tmp_path: Path) -> None:
    names = ("a/src/accelerate/accelerator.py", "b/src/accelerate/accelerator.py")
    old = OLD.splitlines(keepends=True)
    new = NEW.splitlines(keepends=True)
    diff = "".join(difflib.unified_diff(old, new, *names, n=context_lines))
    heading = f"diff --git {' '.join(names)}\nindex 1..2 100644\n"
    path = tmp_path / "change.diff"
    path.write_text(heading + diff, encoding="utf-8")
    _, places = read_change(f"accelerate@{path}")
    code = [place for place in places if '"""' not in place.text]
    assert texts(code) == ["bool(shard),", "state.pop('x', None)", "def new(self):"]
    assert code[0].removed == (line_of("shard,"),)
    assert code[1].after == line_of("state = model.state_dict()")


def test_files_of_another_package_are_passed_over() -> None:
    diff = "--- a/tests/test_x.py\n+++ b/tests/test_x.py\n@@ -1 +1 @@\n-a = 1\n+a = 2\n"
    assert list(places_of_diff(ACCELERATE, diff)) == []
    library_diff = diff.replace("tests/test_x.py", "src/accelerate/state.py")
    (place,) = places_of_diff(ACCELERATE, library_diff)
    assert place.file.path == "state.py"


def test_a_new_and_a_removed_file(copies: tuple[Path, Path]) -> None:
    old, new = (copy / "accelerate" for copy in copies)
    (new / "fresh.py").write_text("def f():\n    return 1\n", encoding="utf-8")
    (old / "gone.py").write_text("A = 1\n", encoding="utf-8")
    places = changed_places(ACCELERATE, old, new)
    in_other_files = [place for place in places if place.file != FILE]
    fresh, gone = in_other_files
    assert fresh.file.path == "fresh.py"
    assert fresh.text == "def f():"
    assert gone.file.path == "gone.py"
    assert gone.text == "A = 1"


def test_cells_that_execute_changed_statements(copies: tuple[Path, Path], reach_map: ReachMap) -> None:
    """A line within a statement counts as the statement."""
    places = changed_between(*copies)
    inner, added, new = reached_places(reach_map, places)
    assert inner.function == "Accelerator.prepare"
    assert inner.contexts == (BUILD,)
    assert added.function == "Accelerator.save"
    assert added.contexts == (SAVE,)
    # No line of the old release says who will call it.
    assert new.contexts == ()


def test_a_replaced_block_has_a_way_for_each_outcome_of_its_condition(
    copies: tuple[Path, Path], reach_map: ReachMap
) -> None:
    old, new = copies
    start = OLD.index("        if shard:")
    end = OLD.index("        return model\n")
    source = OLD[:start] + "        model = self.wrap(model, shard)\n" + OLD[end:]
    (new / "accelerate" / "accelerator.py").write_text(source, encoding="utf-8")
    without_shard = (line_of("if shard:"), line_of("return model"))
    file = AnalysedFile(old / "accelerate" / "accelerator.py", FILE)
    reach_map.add(FILE, DDP, file.executed([without_shard]))
    (place,) = reached_places(reach_map, changed_between(*copies))
    assert set(place.ways) == {(DDP, BUILD), (BUILD,), (DDP,)}


def test_a_changed_signature_concerns_all_that_call_the_function(
    copies: tuple[Path, Path], reach_map: ReachMap
) -> None:
    path = copies[1] / "accelerate" / "accelerator.py"
    path.write_text(OLD.replace("shard=False", "shard=True"), encoding="utf-8")
    places = changed_between(*copies)
    (place,) = reached_places(reach_map, places)
    assert set(place.cells) == {BUILD.driver_and_cell, DDP.driver_and_cell}


def test_the_most_specific_cells_come_first(copies: tuple[Path, Path], reach_map: ReachMap) -> None:
    everywhere = ChangedPlace(FILE, 1, (line_of("if shard:"),), 0, "x", defines=False)
    places = changed_between(*copies)
    reached = reached_places(reach_map, [everywhere, places[0]])
    specific, general = cells_by_specificity(reached)
    assert specific.cell == BUILD.driver_and_cell
    assert specific.places == 2
    assert specific.alone == 1
    assert general.cell == DDP.driver_and_cell
    assert general.places == 1
    assert general.alone == 0


def test_text(copies: tuple[Path, Path], reach_map: ReachMap) -> None:
    places = changed_between(*copies)
    lines = list(changed(reached_places(reach_map, places)))
    assert lines[0] == "3 changed places in 1 file; cells execute 2"
    assert "  accelerate/ddp-fp32-w2: 1 place, 1 of them alone" in lines
    assert "places that no cell executes: 0" in lines
    heading = lines.index("new functions and classes: 1")
    assert lines[heading + 2] == "      def new(self):"
    assert lines[-1] == "places outside functions, which run on import: 0"
    assert max(map(len, lines)) <= WIDTH


def test_what_runs_on_import_is_counted_apart(copies: tuple[Path, Path], reach_map: ReachMap) -> None:
    path = copies[1] / "accelerate" / "accelerator.py"
    path.write_text(OLD.replace('"""Module."""', '"""Module."""\nimport os'), encoding="utf-8")
    places = changed_between(*copies)
    lines = list(changed(reached_places(reach_map, places)))
    assert "places that no cell executes: 0" in lines
    assert lines[-1] == "places outside functions, which run on import: 1"


def test_changed_files_outside_the_map_are_counted(copies: tuple[Path, Path]) -> None:
    """No cell that executes them is known, so they are no places."""
    for number, copy in enumerate(copies):
        directory = copy / "accelerate" / "commands"
        directory.mkdir()
        (directory / "launch.py").write_text(f"A = {number}\n", encoding="utf-8")
        (directory / "same.py").write_text("A = 1\n", encoding="utf-8")
    old, new = copies
    (new / "accelerate" / "commands" / "fresh.py").write_text("A = 1\n", encoding="utf-8")
    assert files_outside(f"accelerate@{old}..{new}") == ["commands/fresh.py", "commands/launch.py"]
    places = changed_between(old, new)
    assert {place.file for place in places} == {FILE}
    assert files_outside("accelerate@x.diff") == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("numpy@a..b", "expected PACKAGE@OLD_DIR..NEW_DIR or PACKAGE@FILE.diff, of accelerate, "),
        ("accelerate", "expected PACKAGE@OLD_DIR..NEW_DIR"),
        ("accelerate@old", "expected two directories as OLD_DIR..NEW_DIR"),
        ("accelerate@no..no", "no: no package accelerate is there"),
        ("accelerate@no.diff", "no.diff: No such file or directory"),
    ],
)
def test_a_change_that_cannot_be_read(text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageProblem, match=message.replace(".", r"\.")):
        read_change(text)
