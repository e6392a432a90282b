"""Where all ranks of Trainer look for a directory, rank 0 makes it late."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pytest_distcompat import clock
from pytest_distcompat.cell import Cell
from pytest_distcompat.drivers.trainer import TrainerDriver
from pytest_distcompat.world import World

BEST = "-set_TrainingArguments.load_best_model_at_end=true"


def make(directory: Path) -> None:
    """Make it as libraries do."""
    os.makedirs(directory, exist_ok=True)  # noqa: PTH103 - the driver patches this very name


@pytest.mark.parametrize(("rank", "setting", "late"), [(0, BEST, True), (1, BEST, False), (0, "", False)])
def test_rank_0_makes_new_directories_late(
    rank: int, setting: str, late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(clock, "sleep", slept.append)
    driver = TrainerDriver(Cell.parse(f"ddp-fp32-w2-model_mlp{setting}"), World(rank, 2, rank, "cpu"))
    new = tmp_path / "new"
    with driver._late_directories():
        make(new)
        make(new)
    make(tmp_path / "later")
    assert len(slept) == late
    assert new.is_dir()
