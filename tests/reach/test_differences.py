"""Cells whose values changed, with the functions that differ in what they execute."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path

import pytest

from pytest_distcompat.cli.main import main
from pytest_distcompat.ext.reach.analysis import AnalysedFile
from pytest_distcompat.ext.reach.branches import Executed, bits_of
from pytest_distcompat.ext.reach.differences import actions_before, difference_lines, function_differences
from pytest_distcompat.ext.reach.libraries import FileId
from pytest_distcompat.ext.reach.map import Context, ReachMap
from pytest_distcompat.ext.reach.store import write_map
from pytest_distcompat.report.document import Report
from pytest_distcompat.report.result import Row
from pytest_distcompat.report.values import Extent, ValueChange
from pytest_distcompat.report.write import write_report

FILE = FileId("accelerate", "accelerator.py")
OLD = """
def build(shard):
    if shard:
        return 1
    return 2

def step(clip):
    return clip

def export():
    return 3
"""
CHANGE = ValueChange("d", "c", Extent.BEYOND, "loss of step 1", 0.5)


def mapped(directory: Path, executed: Mapping[str, tuple[str, ...]], source: str = OLD) -> ReachMap:
    """A map of that source, in which the cell executes these lines in each action."""
    path = directory / "accelerate" / "accelerator.py"
    path.parent.mkdir(parents=True)
    (path.parent / "__init__.py").touch()
    path.write_text(source, encoding="utf-8")
    analysed = AnalysedFile(path, FILE)
    lines = source.splitlines()
    reach_map = ReachMap({"accelerate": "1.0"}, {FILE: analysed.file})
    for action, texts in executed.items():
        numbers = [lines.index(text) + 1 for text in texts]
        # Coverage has -1 before the first line of a function, and after its last one.
        arcs = itertools.pairwise([-1, *numbers, -1])
        branches = analysed.executed(list(arcs))
        reach_map.add(FILE, Context("d", "c", action), branches | Executed(bits_of(numbers)))
    return reach_map


EXECUTED: Mapping[str, tuple[str, ...]] = {
    "build": ("    if shard:", "    return 2"),
    "step": ("    return clip",),
    "export": ("    return 3",),
}


def differences(
    tmp_path: Path, source: str = OLD, change: ValueChange = CHANGE, **executed: tuple[str, ...]
) -> list[str]:
    earlier = mapped(tmp_path / "old", EXECUTED)
    later = mapped(tmp_path / "new", {**EXECUTED, **executed}, source)
    texts = []
    for difference in function_differences(earlier, later, change):
        texts.append(f"{difference.function}: {difference.how}")
    return texts


def test_the_same_release_differs_in_nothing(tmp_path: Path) -> None:
    assert differences(tmp_path, "\n\n" + OLD) == []


def test_another_branch(tmp_path: Path) -> None:
    other_branch = ("    if shard:", "        return 1")
    assert differences(tmp_path, build=other_branch) == ["build: takes other branches"]


def test_another_statement(tmp_path: Path) -> None:
    source = OLD.replace("    return clip", "    clip = 1\n    return clip")
    assert differences(tmp_path, source) == ["step: has other statements"]


def test_a_function_that_is_new_or_gone(tmp_path: Path) -> None:
    source = OLD.replace("def step(clip)", "def clipped(clip)")
    assert differences(tmp_path, source) == ["step: is not executed any more", "clipped: is newly executed"]


def test_what_comes_after_the_difference_is_no_cause(tmp_path: Path) -> None:
    """Of a file's format the save may be."""
    source = OLD.replace("    return 3", "    save = 3\n    return save")
    export = ("    return save",)
    assert differences(tmp_path, source, export=export) == []
    of_format = ValueChange("d", "c", Extent.FORMAT, "a.pt is new")
    assert actions_before(of_format) is None
    again = tmp_path / "again"
    assert differences(again, source, of_format, export=export) == ["export: has other statements"]


@pytest.mark.parametrize(
    ("first", "steps"),
    [("build parameter", False), ("step 1 parameter", True), ("loss of step 3", True), ("export parameter", None)],
)
def test_the_actions_before_a_difference(first: str, steps: bool | None) -> None:
    actions = actions_before(ValueChange("d", "c", Extent.ROUNDED, first))
    if steps is None:
        assert actions is None
    else:
        assert actions is not None
        assert ("step" in actions) == steps


def test_cells_that_differ_alike_are_listed_together(tmp_path: Path) -> None:
    earlier = mapped(tmp_path / "old", EXECUTED)
    later = mapped(tmp_path / "new", EXECUTED)
    others = [ValueChange("d", name, Extent.ROUNDED, "build parameter") for name in ("x", "y")]
    lines = list(difference_lines(others, earlier, later, []))
    assert lines == [
        "x (d): values changed within rounding: build parameter; no number of a step shows it",
        "y (d): values changed within rounding: build parameter; no number of a step shows it",
        "  nothing that the cell executes before differs in the map: another package may have changed",
    ]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By two maps the functions, by a change the places."""
    source = OLD.replace("    return clip", "    clip = 1\n    return clip")
    old_map, new_map = tmp_path / "old.sqlite", tmp_path / "new.sqlite"
    write_map(old_map, mapped(tmp_path / "old", EXECUTED))
    write_map(new_map, mapped(tmp_path / "new", EXECUTED, source))
    last, today = tmp_path / "last.json", tmp_path / "today.json"
    write_report(last, report_of_loss(1.0))
    write_report(today, report_of_loss(2.0))
    values = ["--values", str(last), str(today)]
    head = [
        "cells whose values differ: 1",
        "c (d): values changed beyond rounding: loss of step 1; numbers differ by up to 0.5 of them",
    ]
    assert main(["reach", str(new_map), *values, "--compare", str(old_map)]) == 0
    assert capsys.readouterr().out.splitlines() == [*head, "  accelerate/accelerator.py step: has other statements"]
    change = f"accelerate@{tmp_path / 'old'}..{tmp_path / 'new'}"
    assert main(["reach", str(old_map), *values, "--changed", change]) == 0
    assert capsys.readouterr().out.splitlines() == [*head, "  accelerate/accelerator.py:8 step: clip = 1"]
    assert main(["reach", str(old_map), *values]) == 2
    assert "--values needs what has changed" in capsys.readouterr().err


def report_of_loss(loss: float) -> Report:
    return Report(rows=[Row("S", "d", "c", values={"numbers": {"loss": [loss]}})])
