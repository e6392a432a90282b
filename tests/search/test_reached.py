"""What a search takes from a map: the branches that are not new, and who reads which name."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_distcompat.ext.reach.branches import Branch, Executed, Rank, SourceFile
from pytest_distcompat.ext.reach.libraries import FileId, installed_versions
from pytest_distcompat.ext.reach.map import Context, ReachMap
from pytest_distcompat.ext.reach.store import write_map
from pytest_distcompat.ext.search.reached import Branches, read_reached
from pytest_distcompat.failures import UsageProblem

FILE = FileId("torch", "distributed/fsdp/api.py")


def written(path: Path, version: str) -> Path:
    def branch(target: int, text: str) -> Branch:
        return Branch("f", 3, target, text, "", Rank.PUBLIC)

    branches = (branch(4, "if limit_all_gathers:"), branch(5, "if limit_all_gathers:"), branch(6, "if sync == 'x':"))
    reach_map = ReachMap({"torch": version}, {FILE: SourceFile(FILE, (), branches)})
    reach_map.add(FILE, Context("torch", "ddp-fp32-w2", "step"), Executed(branches=0b001))
    reach_map.add(FILE, Context("torch", "ddp-fp32-w2", "save"), Executed(branches=0b001))
    write_map(path, reach_map)
    return path


def test_what_cells_reach_is_not_new_and_names_in_the_rest_are_counted(tmp_path: Path) -> None:
    reached = read_reached(written(tmp_path / "reach.sqlite", installed_versions()["torch"]))
    assert len(reached.branches) == 1
    new = Branches({FILE: 0b111}).without(reached.branches)
    assert new == Branches({FILE: 0b110})
    assert Branches.from_data(new.as_data()) == new
    assert reached.readers["limit_all_gathers"] == 1
    assert reached.readers["sync"] == 1


def test_a_map_of_another_release_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageProblem, match=r"the map is of torch 1\.0"):
        read_reached(written(tmp_path / "reach.sqlite", "1.0"))
