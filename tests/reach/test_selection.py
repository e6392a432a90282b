"""The cells that a change concerns: which, in which order, and the file that names them."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_distcompat.cli.main import main
from pytest_distcompat.ext.reach.analysis import AnalysedFile
from pytest_distcompat.ext.reach.branches import Executed, bits_of
from pytest_distcompat.ext.reach.changed import PlaceReach
from pytest_distcompat.ext.reach.diffs import ChangedPlace
from pytest_distcompat.ext.reach.libraries import FileId
from pytest_distcompat.ext.reach.map import Context, ReachMap
from pytest_distcompat.ext.reach.selection import check_release, file_lines, select
from pytest_distcompat.ext.reach.store import write_map
from pytest_distcompat.failures import UsageProblem

FILE = FileId("accelerate", "accelerator.py")
OLD = "import os\n\n\ndef build():\n    return 1\n\n\ndef save():\n    return 2\n"


def reach(cells: str, *, action: str = "build", function: str = "f", line: int = 1) -> PlaceReach:
    """A place that these cells execute in that action."""
    contexts = tuple(Context("d", cell, action) for cell in cells)
    place = ChangedPlace(FILE, line, (line,), 0, "x", defines=False)
    return PlaceReach(place, function, contexts, (contexts,))


def branched(*ways: str) -> PlaceReach:
    """A replaced block with a way for each of these, whose words are cells that go it."""
    contexts_by_way = []
    for way in ways:
        contexts_by_way.append(tuple(Context("d", cell, "step") for cell in way.split()))
    contexts = dict.fromkeys(itertools.chain.from_iterable(contexts_by_way))
    place = ChangedPlace(FILE, 1, (1, 2, 3), 0, "x", defines=False)
    return PlaceReach(place, "f", tuple(contexts), tuple(contexts_by_way))


def selected(*reached: PlaceReach, turns: int | None = None) -> list[str]:
    choices = select(ReachMap(), reached, turns)
    return [f"{choice.turn} {choice}" for choice in choices]


def test_the_most_specific_cell_comes_first() -> None:
    """What one cell alone executes is seen nowhere else."""
    cells = selected(reach("abc"), reach("c"), reach("ab"))
    assert cells == ["1 d/c: build", "1 d/a: build", "2 d/b: build"]


def test_a_cell_that_executes_the_same_as_an_earlier_one_comes_in_a_later_turn() -> None:
    cells = selected(reach("abc"), reach("abcd", action="save"), reach("d"))
    assert cells == ["1 d/d: build, save", "1 d/a: build, save", "2 d/b: build, save", "3 d/c: build, save"]


def test_an_action_of_its_own_is_something_of_its_own() -> None:
    """A function that builds and loads has to be seen in both."""
    build = reach("ab", action="build")
    load = reach("b", action="load")
    both = (*build.contexts, *load.contexts)
    built_and_loaded = PlaceReach(build.place, build.function, both, (both,))
    assert selected(built_and_loaded) == ["1 d/b: build, load", "2 d/a: build"]


def test_each_way_through_a_replaced_block_is_executed() -> None:
    """A cell that goes one way shows nothing of the other."""
    block = branched("ddp-fp32-w2 zero2-fp32-w2 fsdp2-fp32-w2", "ddp-fp32-w2 fsdp2-fp32-w2", "zero2-fp32-w2")
    assert selected(block, turns=1) == ["1 d/zero2-fp32-w2: step", "1 d/ddp-fp32-w2: step"]


def test_a_cell_of_another_strategy_comes_before_another_of_the_same() -> None:
    block = branched("ddp-fp32-w2 ddp-fp32-w2-grad_accum_2 ddp-fp32-w4 fsdp2-fp32-w2 fsdp2-fp32-w4")
    assert selected(block, turns=4) == [
        "1 d/ddp-fp32-w2: step",
        "2 d/fsdp2-fp32-w2: step",
        "3 d/ddp-fp32-w2-grad_accum_2: step",
        "4 d/ddp-fp32-w4: step",
    ]


def test_another_strategy_counts_by_place() -> None:
    """What a strategy executed of one place says nothing of another."""
    first = branched("ddp-a ddp-b fsdp2-a")
    elsewhere = ChangedPlace(FILE, 9, (9,), 0, "y", defines=False)
    second = replace(branched("ddp-b"), place=elsewhere)
    assert selected(first, second) == ["1 d/ddp-b: step", "2 d/fsdp2-a: step", "3 d/ddp-a: step"]


def test_only_so_many_cells_for_each_place() -> None:
    assert selected(reach("abc"), turns=2) == ["1 d/a: build", "2 d/b: build"]
    assert selected() == []


def mapped(directory: Path) -> ReachMap:
    """Two cells build, one of them saves."""
    path = directory / "accelerate" / "accelerator.py"
    path.parent.mkdir(parents=True)
    (path.parent / "__init__.py").touch()
    path.write_text(OLD, encoding="utf-8")
    file = AnalysedFile(path, FILE).file
    reach_map = ReachMap({"accelerate": "1.0"}, {FILE: file})
    reach_map.add(FILE, Context("d", "a", "build"), Executed(bits_of([5])))
    reach_map.add(FILE, Context("d", "b", "build"), Executed(bits_of([5])))
    reach_map.add(FILE, Context("d", "b", "save"), Executed(bits_of([9])))
    return reach_map


def test_what_runs_on_import_is_left_to_one_cell_that_uses_the_file(tmp_path: Path) -> None:
    reach_map = mapped(tmp_path)
    on_import = reach("", function="")
    (choice,) = select(reach_map, [on_import])
    assert str(choice) == "d/a: start"
    # A cell that runs anyway will do.
    (choice,) = select(reach_map, [on_import, reach("b", action="save")])
    assert str(choice) == "d/b: save, start"


def test_the_command_writes_the_cells_and_says_what_none_executes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    map_path = tmp_path / "r.sqlite"
    write_map(map_path, mapped(tmp_path / "old"))
    new = tmp_path / "new" / "accelerate"
    new.mkdir(parents=True)
    (new / "__init__.py").touch()
    with_load = OLD.replace("import os\n", "import os\n\n\ndef load():\n    return 3\n")
    source = with_load.replace("return 2", "return 4")
    (new / "accelerator.py").write_text(source, encoding="utf-8")
    change = f"accelerate@{tmp_path / 'old'}..{tmp_path / 'new'}"
    cells = tmp_path / "cells"
    assert main(["reach", str(map_path), "--changed", change, "--select", str(cells)]) == 0
    heading, *lines = cells.read_text(encoding="utf-8").splitlines()
    assert heading.startswith(f"# {change}: ")
    # The map knows nothing of further cells.
    assert lines == ["d/b: save", "* *", "- d/a"]
    assert capsys.readouterr().out.splitlines() == [
        "2 changed places in 1 file; cells execute 1",
        "",
        "places that no cell executes: 0",
        "new functions and classes: 1",
        "  accelerate/accelerator.py:4 def load():",
        "places outside functions, which run on import: 0",
        "selected cells: 1; the first 1 execute each way through each changed place that any cell executes",
    ]


def test_places_that_no_cell_executes_are_listed_by_function(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reach_map = mapped(tmp_path / "old")
    reach_map.executed.clear()
    map_path = tmp_path / "r.sqlite"
    write_map(map_path, reach_map)
    diff = tmp_path / "x.diff"
    diff.write_text(
        "--- a/accelerate/accelerator.py\n+++ b/accelerate/accelerator.py\n@@ -9 +9 @@\n-    return 2\n+    return 3\n"
    )
    cells = tmp_path / "c"
    assert main(["reach", str(map_path), "--changed", f"accelerate@{diff}", "--select", str(cells)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "  accelerate/accelerator.py save: 9" in lines


def test_unknown_cells_come_after_those_that_execute_all_once(tmp_path: Path) -> None:
    reach_map = mapped(tmp_path)
    reach_map.add(FILE, Context("d", "c", "build"), Executed(bits_of([5])))
    choices = select(reach_map, [reach("ab")])
    lines = list(file_lines("x", choices, reach_map, "d/*"))
    assert lines[1:] == ["d/a: build", "* d/*", "d/b: build", "- d/c"]


def test_a_map_of_another_release_is_refused(tmp_path: Path) -> None:
    reach_map = mapped(tmp_path)
    check_release(reach_map, "accelerate", "1.0")
    check_release(reach_map, "accelerate", None)
    with pytest.raises(UsageProblem, match=r"the map is of accelerate 1\.0, and the old release is 0\.9"):
        check_release(reach_map, "accelerate", "0.9")
