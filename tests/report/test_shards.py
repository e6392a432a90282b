"""Shards of a session: their reports make up the whole, and the baseline says what takes how long."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pytest_distcompat.cli import main
from pytest_distcompat.report.document import Report

from .test_session import RUNS, STATUS, load, statuses

if TYPE_CHECKING:
    from .conftest import Session


@pytest.mark.parametrize("workers", [(), pytest.param(("-n", "2"), marks=pytest.mark.nightly)], ids=["alone", "xdist"])
def test_shards_make_up_the_whole(session: Session, tmp_path: Path, workers: tuple[str, ...]) -> None:
    session("--distcompat-report=last.json", runs=RUNS)
    for number in (1, 2):
        options = [f"--distcompat-shard={number}/2", "--distcompat-baseline=last.json"]
        done = session(*options, f"--distcompat-report={number}.json", *workers, runs=RUNS)
        # Cells of the other shard are not missing.
        assert done.returncode == pytest.ExitCode.OK, done.stdout + done.stderr
        assert f"\nshard {number}/2: " in done.stdout
    unit, two = (load(tmp_path / f"{number}.json") for number in (1, 2))
    assert unit["session"]["shard"] == {"number": 1, "plan": two["session"]["shard"]["plan"]}
    assert not statuses(unit).keys() & statuses(two).keys()
    assert statuses(unit) | statuses(two) == STATUS
    # Five runs take half a second each, the killed one 1.5.
    for shard in (unit, two):
        assert sum(run["seconds"] for run in shard["runs"]) == 2.0
    files = [str(tmp_path / f"{name}.json") for name in ("1", "2", "out")]
    assert main(["merge", *files[:2], "-o", files[2]]) == 0
    assert statuses(load(tmp_path / "out.json")) == STATUS
    assert not Report.read(tmp_path / "out.json").interrupted
    assert main(["merge", files[1], "-o", files[2]]) == 1
    # A shard without tests is green, and has a report.
    done = session("--distcompat-shard=2/2", "-k", "ddp-fp32", "--distcompat-report=3.json", *workers)
    assert done.returncode == pytest.ExitCode.OK, done.stdout + done.stderr
    assert load(tmp_path / "3.json")["session"]["shard"]["plan"] == [["test_mine.py::TestMine[ddp-fp32-w2]"], []]
