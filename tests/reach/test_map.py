"""Maps: from ranks' files to a file of SQLite and back, merged, selected, compared, as text and as a page."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
from pathlib import Path

import pytest

from pytest_distcompat.ext.reach import collect as collecting
from pytest_distcompat.ext.reach.branches import Branch, Executed, Function, Rank, SourceFile, bits_of
from pytest_distcompat.ext.reach.collect import collect
from pytest_distcompat.ext.reach.compare import compare
from pytest_distcompat.ext.reach.libraries import FileId
from pytest_distcompat.ext.reach.map import Context, ReachMap
from pytest_distcompat.ext.reach.page import page
from pytest_distcompat.ext.reach.rank_files import reach_file
from pytest_distcompat.ext.reach.store import read_map, write_map
from pytest_distcompat.ext.reach.text import WIDTH, functions, headline, missing, overview, unreached
from pytest_distcompat.failures import UsageProblem

FILE = FileId("lib", "trainer.py")
BRANCHES = (
    Branch("_inner", 20, 21, "if x < y:", "one()", Rank.INTERNAL),
    Branch("_inner", 20, 30, "if x < y:", "two()", Rank.INTERNAL),
    Branch("prepare", 40, 41, "if shard:", "three()", Rank.PUBLIC_SETTING),
    Branch("prepare", 40, -39, "if shard:", "", Rank.PUBLIC_SETTING),
)
FUNCTIONS = (
    Function("_inner", 19, bits_of(range(20, 31)), public=False),
    Function("prepare", 39, bits_of(range(40, 42)), public=True),
)
SAVE = Context("torch", "fsdp2-fp32-w2", "save")
STEP = Context("accelerate", "ddp-fp32-w2", "step")


def a_map(version: str = "1.0", branches: tuple[Branch, ...] = BRANCHES) -> ReachMap:
    versions = {"lib": version, "python": "3.11"}
    file = SourceFile(FILE, FUNCTIONS, branches)
    return ReachMap(versions, {FILE: file})


def executed(lines: list[int], branches: list[int]) -> Executed:
    return Executed(bits_of(lines), bits_of(branches))


@pytest.fixture
def reach_map() -> ReachMap:
    """One branch of ``prepare`` is executed by two cells, one of ``_inner`` by one."""
    reach_map = a_map()
    reach_map.add(FILE, SAVE, executed([20, 40, 41], [0, 2]))
    reach_map.add(FILE, STEP, executed([40, 41], [2]))
    return reach_map


def contexts(reach_map: ReachMap) -> dict[str, tuple[Context, ...]]:
    branches = reach_map.coverage_of(FILE).branches()
    return {branch.branch.arrow: branch.contexts for branch in branches}


def test_branches_have_the_contexts_that_reach_them(reach_map: ReachMap) -> None:
    assert contexts(reach_map) == {
        "20 -> 21": (SAVE,),
        "20 -> 30": (),
        "40 -> 41": (STEP, SAVE),
        "40 -> exit": (),
    }
    counts = reach_map.coverage_of(FILE).counts()
    assert counts.branches == 4
    assert counts.reached_branches == 2
    assert counts.reached_functions == 2
    assert counts.percent == 50.0


def test_a_file_holds_all_of_a_map(reach_map: ReachMap, tmp_path: Path) -> None:
    path = tmp_path / "r.sqlite"
    path.write_text("a report of another program", encoding="utf-8")
    write_map(path, reach_map)
    assert read_map(path) == reach_map
    assert [path.name for path in tmp_path.iterdir()] == ["r.sqlite"]


def test_equal_cells_share_a_row(reach_map: ReachMap, tmp_path: Path) -> None:
    """Hundreds of cells execute the same lines of a file."""
    import sqlite3

    for number in range(50):
        context = Context("torch", f"ddp-fp32-w{number + 2}", "step")
        reach_map.add(FILE, context, executed([40], []))
    write_map(tmp_path / "r.sqlite", reach_map)
    with sqlite3.connect(tmp_path / "r.sqlite") as database:
        ((rows,),) = database.execute("select count(*) from executed")
    assert rows == 3


@pytest.mark.parametrize("source", ["pass\n", "if (\n"])
def test_garbage_is_collected_again_after_the_analysis(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after a file that cannot be parsed."""
    path = tmp_path / "trainer.py"
    path.write_text(source, encoding="utf-8")
    monkeypatch.setattr(collecting, "installed_files", lambda: {path: FILE})
    with contextlib.suppress(SyntaxError):
        collect([])
    assert gc.isenabled()


@pytest.mark.parametrize("content", [None, b"no database at all, but long enough to look like one" * 20, b""])
def test_another_file_is_refused_by_name(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "r.sqlite"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageProblem, match=r"r\.sqlite: "):
        read_map(path)


def test_shards_are_one_map(reach_map: ReachMap) -> None:
    other = a_map()
    other.add(FILE, STEP, executed([20], [1]))
    reach_map.merge(other)
    assert contexts(reach_map)["20 -> 30"] == (STEP,)
    assert contexts(reach_map)["40 -> 41"] == (STEP, SAVE)


def test_maps_of_different_releases_are_not_merged(reach_map: ReachMap) -> None:
    with pytest.raises(ValueError, match=r"different releases: lib 1\.0 and 2\.0"):
        reach_map.merge(a_map("2.0"))


@pytest.mark.parametrize("pattern", ["ddp-*", "accelerate/*", "ddp-fp32-w2", "accelerate/ddp-fp32-w2"])
def test_cells_are_selected_by_id_and_pattern(pattern: str, reach_map: ReachMap) -> None:
    selected = reach_map.only(pattern)
    assert contexts(selected) == {
        "20 -> 21": (),
        "20 -> 30": (),
        "40 -> 41": (STEP,),
        "40 -> exit": (),
    }


def test_what_no_cell_reaches_is_sorted_by_what_users_run_into(reach_map: ReachMap) -> None:
    branches = unreached(reach_map, ["lib"])
    lines = list(missing(branches, "branches that no cell reaches"))
    assert lines == [
        "branches that no cell reaches: 2",
        "public functions first, then those that read an argument or a setting",
        "lib/trainer.py prepare (public, setting)",
        "    40 -> exit      if shard:",
        "lib/trainer.py _inner (internal)",
        "    20 -> 30        if x < y:",
    ]


def test_text_of_a_library(reach_map: ReachMap) -> None:
    assert list(functions(reach_map, "lib")) == [
        "lib 1.0",
        "",
        "lib/trainer.py: 2 of 4 branches",
        "  prepare: 1 of 2 branches, 2 cells in step save: accelerate/ddp-fp32-w2, torch/fsdp2-fp32-w2",
        "    40 -> 41        if shard:",
        "        2 cells in step save: accelerate/ddp-fp32-w2, torch/fsdp2-fp32-w2",
        "    40 -> exit      if shard:",
        "        no cell",
        "  _inner: 1 of 2 branches, 1 cell in save: torch/fsdp2-fp32-w2",
        "    20 -> 21        if x < y:",
        "        1 cell in save: torch/fsdp2-fp32-w2",
        "    20 -> 30        if x < y:",
        "        no cell",
    ]


def test_text_fits_a_terminal() -> None:
    long = "x" * 300
    branch = Branch(long, 123456, -1, long, long, Rank.PUBLIC)
    file_id = FileId("lib", f"{long}.py")
    function = Function(long, 1, 2, public=True)
    file = SourceFile(file_id, (function,), (branch,))
    reach_map = ReachMap({"lib": long}, {file_id: file})
    reach_map.add(file_id, Context(long, long, long), Executed(2, 1))
    reach_map.add(file_id, Context(long, "b", long), Executed(2, 1))
    branches = unreached(reach_map.only("no"), ["lib"])
    lines = [
        *overview(reach_map),
        *functions(reach_map, "lib"),
        *missing(branches, long),
    ]
    for line in lines:
        assert len(line) <= WIDTH, line


def test_the_headline_counts(reach_map: ReachMap) -> None:
    assert headline(reach_map) == "2 of 4 branches (50.0 %) are executed by 2 cells of 2 drivers"


def test_the_page_has_branches_and_escapes_source(reach_map: ReachMap) -> None:
    text = page(reach_map)
    assert "if x &lt; y:" in text
    assert "<script" not in text
    assert "2 of 4 branches (50.0 %)" in text
    assert "torch/fsdp2-fp32-w2" in text


def test_new_code_of_a_release_that_no_cell_reaches(reach_map: ReachMap) -> None:
    new = (
        Branch("prepare", 90, 91, "if new:", "four()", Rank.PUBLIC),
        Branch("prepare", 90, 95, "if new:", "five()", Rank.PUBLIC),
    )
    # The old ones have moved by ten lines.
    moved = []
    for branch in BRANCHES:
        line, target = branch.line + 10, branch.target + 10
        moved.append(dataclasses.replace(branch, line=line, target=target))
    later = a_map("2.0", (*moved, *new))
    later.add(FILE, SAVE, executed([30, 90], [0, 4]))
    news = compare(reach_map, later)
    assert [branch.branch for branch in news.unreached] == [new[1]]
    assert [branch.branch for branch in news.reached] == [new[0]]
    assert [branch.branch.text for branch in news.lost] == ["if shard:"]


def test_a_library_that_is_only_in_one_map_is_no_news(reach_map: ReachMap) -> None:
    """An environment that lacks a library does not make all of it new."""
    assert compare(ReachMap({}, {}), reach_map).unreached == ()


def test_files_of_ranks_are_collected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "trainer.py"
    source.write_text("def f(a):\n    if a:\n        return 1\n    return 2\n", encoding="utf-8")
    monkeypatch.setattr(collecting, "installed_files", lambda: {source: FILE})
    monkeypatch.setattr(collecting, "installed_versions", lambda: {"lib": "1.0"})
    files = [["lib", "trainer.py"], ["lib", "gone.py"]]

    def write(run: str, rank: int, arcs: list[int]) -> None:
        directory = tmp_path / run
        directory.mkdir(exist_ok=True)
        actions = {"step": {"0": arcs, "1": arcs}}
        data = {"driver": "torch", "cell": run, "files": files, "actions": actions}
        text = json.dumps(data)
        reach_file(directory, rank).write_text(text, encoding="utf-8")

    write("a", 0, [-1, 2, 2, 3])
    write("a", 1, [2, 4])
    write("b", 0, [-1, 2])
    collected = collect([tmp_path / "a", tmp_path / "b", tmp_path / "none"])
    context = Context("torch", "a", "step")
    assert contexts(collected) == {"2 -> 3": (context,), "2 -> 4": (context,)}
    # A file of another release on another node has no lines here.
    assert set(collected.executed) == {FILE}
    assert collected.versions["lib"] == "1.0"
