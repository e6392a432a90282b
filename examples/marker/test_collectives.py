"""Ordinary tests on every rank of a process group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pytest_distcompat import Cell


@pytest.mark.distcompat(world_size=2)
def test_all_reduce(process_group: Any, rank: int, world_size: int) -> None:
    import torch
    from torch import distributed

    total = torch.tensor([rank + 1.0])
    distributed.all_reduce(total)
    assert total.item() == world_size * (world_size + 1) / 2


@pytest.mark.distcompat(world_size=2)
@pytest.mark.parametrize("size", [3, 8])
def test_ranks_share_a_directory(rank: int, shared_dir: Path, tmp_path: Path, size: int) -> None:
    (shared_dir / f"from-{rank}").write_text("x" * size)
    assert not list(tmp_path.iterdir()), "tmp_path is each rank's own"


@pytest.mark.distcompat(strategies=["ddp", "fsdp2"], precisions=["fp32", "bf16_upcast"])
def test_runs_once_for_each_cell(cell: Cell) -> None:
    assert cell.world_size == 2
    assert cell.strategy in {"ddp", "fsdp2"}
