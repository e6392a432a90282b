"""The command ``distcompat reach`` whose reader has gone, as ``head`` does once it has its lines."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from pytest_distcompat.cli.main import main
from pytest_distcompat.ext.reach.branches import Branch, Executed, Function, Rank, SourceFile, bits_of
from pytest_distcompat.ext.reach.libraries import FileId
from pytest_distcompat.ext.reach.map import Context, ReachMap
from pytest_distcompat.ext.reach.store import read_map, write_map

FILE = FileId("lib", "trainer.py")
FUNCTIONS = (Function("prepare", 1, bits_of([2, 3]), public=True),)
BRANCHES = (Branch("prepare", 2, 3, "if shard:", "one()", Rank.PUBLIC),)


class ClosedPipe(io.StringIO):
    """A pipe that nobody reads any more."""

    def write(self, _text: str) -> int:
        raise BrokenPipeError


def write_shard(path: Path, cell: str) -> str:
    """Write the map of one cell, and return the path as an argument."""
    reach_map = ReachMap({"lib": "1.0"}, {FILE: SourceFile(FILE, FUNCTIONS, BRANCHES)})
    reach_map.add(FILE, Context("torch", cell, "build"), Executed(bits_of([2, 3]), 1))
    write_map(path, reach_map)
    return str(path)


def test_files_are_written_though_nobody_reads_the_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = [write_shard(tmp_path / "a", "ddp-fp32-w2"), write_shard(tmp_path / "b", "fsdp2-fp32-w2")]
    merged, page = tmp_path / "merged", tmp_path / "page.html"
    monkeypatch.setattr(sys, "stdout", ClosedPipe())
    # The command closes it.
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert main(["reach", *shards, "-o", str(merged), "--html", str(page)]) == 1
    cells = {context.cell for context in read_map(merged).contexts()}
    assert cells == {"ddp-fp32-w2", "fsdp2-fp32-w2"}
    assert "2 cells" in page.read_text(encoding="utf-8")


def test_a_mistake_in_the_options_writes_no_map(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shard = write_shard(tmp_path / "a", "ddp-fp32-w2")
    merged = tmp_path / "merged"
    values = ["--values", str(tmp_path / "last.json"), str(tmp_path / "today.json")]
    assert main(["reach", shard, *values, "-o", str(merged)]) == 2
    assert "--values needs what has changed" in capsys.readouterr().err
    assert not merged.exists()
