"""Cells whose values changed, with the functions that differ in what they execute."""

from __future__ import annotations

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
        arcs = list(zip([-1, *numbers], [*numbers, -1], strict=True))
        reach_map.add(FILE, Context("d", "c", action), analysed.executed(arcs) | Executed(bits_of(numbers)))
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
    return [f"{difference.function}: {difference.how}" for difference in function_differences(earlier, later, change)]


def test_the_same_release_differs_in_nothing(tmp_path: Path) -> None:
    assert differences(tmp_path, "\n\n" + OLD) == []


def test_another_branch(tmp_path: Path) -> None:
    assert differences(tmp_path, build=("    if shard:", "        return 1")) == ["build: takes other branches"]


def test_another_statement(tmp_path: Path) -> None:
    assert differences(tmp_path, OLD.replace("    return clip", "    clip = 1\n    return clip")) == [
        "step: has other statements"
    ]


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
    for directory in ("old", "new"):
        (tmp_path / directory / "accelerate" / "__init__.py").unlink()
        (tmp_path / directory / "accelerate" / "accelerator.py").unlink()
        (tmp_path / directory / "accelerate").rmdir()
    assert differences(tmp_path, source, of_format, export=export) == ["export: has other statements"]


@pytest.mark.parametrize(
    ("first", "steps"),
    [("build parameter", False), ("step 1 parameter", True), ("loss of step 3", True), ("export parameter", None)],
)
def test_the_actions_before_a_difference(first: str, steps: bool | None) -> None:
    actions = actions_before(ValueChange("d", "c", Extent.ROUNDED, first))
    assert (None if actions is None else "step" in actions) is steps


def test_cells_that_differ_alike_are_listed_together(tmp_path: Path) -> None:
    earlier, later = mapped(tmp_path / "old", EXECUTED), mapped(tmp_path / "new", EXECUTED)
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
    write_map(tmp_path / "old.sqlite", mapped(tmp_path / "old", EXECUTED))
    write_map(tmp_path / "new.sqlite", mapped(tmp_path / "new", EXECUTED, source))
    reports = [str(tmp_path / "last.json"), str(tmp_path / "today.json")]
    for path, loss in zip(reports, (1.0, 2.0), strict=True):
        write_report(Path(path), Report(rows=[Row("S", "d", "c", values={"numbers": {"loss": [loss]}})]))
    values = ["--values", *reports]
    head = [
        "cells whose values differ: 1",
        "c (d): values changed beyond rounding: loss of step 1; numbers differ by up to 0.5 of them",
    ]
    assert main(["reach", str(tmp_path / "new.sqlite"), *values, "--compare", str(tmp_path / "old.sqlite")]) == 0
    assert capsys.readouterr().out.splitlines() == [*head, "  accelerate/accelerator.py step: has other statements"]
    change = f"accelerate@{tmp_path / 'old'}..{tmp_path / 'new'}"
    assert main(["reach", str(tmp_path / "old.sqlite"), *values, "--changed", change]) == 0
    assert capsys.readouterr().out.splitlines() == [*head, "  accelerate/accelerator.py:8 step: clip = 1"]
    assert main(["reach", str(tmp_path / "old.sqlite"), *values]) == 2
    assert "--values needs what has changed" in capsys.readouterr().err
