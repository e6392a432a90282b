"""Cells whose nodes have checkpoints of their own: which there are, which checks they have, and what the session needs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks import CHECKS
from pytest_distcompat.drivers import DRIVERS
from pytest_distcompat.ext.cluster.placement import ClusterPlacement
from pytest_distcompat.plugin import packing
from pytest_distcompat.world import World

PLAIN = "checkpoints on each node are tried with plain data parallel ranks alone, without experts"


@pytest.mark.parametrize(
    ("driver", "cell", "reason"),
    [
        ("torch", "ddp-fp32-w2-n2-checkpoints_node", None),
        (
            "torch",
            "fsdp2-fp32-w2-n2-checkpoints_node",
            "torch.distributed.checkpoint writes the metadata of shards on rank 0",
        ),
        ("torch", "fsdp2-fp32-w2-n2-state_dict_full-checkpoints_node", None),
        ("torch", "ddp-fp32-w2-n2-async_save-checkpoints_node", "async_save is for sharded checkpoints"),
        ("torch", "fsdp2-fp32-w4-n2-state_dict_full-tp_2-checkpoints_node", PLAIN),
        ("accelerate", "ddp-fp32-w2-n2-checkpoints_node", None),
        ("accelerate", "zero3-fp32-w2-n2-checkpoints_node", None),
        ("accelerate", "fsdp2-fp32-w2-n2-checkpoints_node", "of FSDP's files accelerate writes some on rank 0 alone"),
        ("trainer", "ddp-fp32-w2-n2-checkpoints_node", None),
        ("accelerate", "fsdp2-fp32-w2-n2-state_dict_full-checkpoints_node", None),
        (
            "trainer",
            "fsdp2-fp32-w2-n2-state_dict_full-checkpoints_node",
            "Trainer loads FSDP's optimizer where it finds ",
        ),
        ("deepspeed", "zero2-fp32-w2-n2-checkpoints_node", None),
        ("deepspeed", "zero2-fp32-w4-n2-cp_2-checkpoints_node", PLAIN),
        ("deepspeed", "zero2-fp32-w2-n2-model_moe_deepspeed-checkpoints_node", PLAIN),
    ],
)
def test_cells(driver: str, cell: str, reason: str | None) -> None:
    actual = DRIVERS.get(driver).unsupported_reason(Cell.parse(cell))
    assert_starts_with(actual, reason)


def assert_starts_with(actual: str | None, reason: str | None) -> None:
    """Check how a reason starts; None if there is to be none."""
    if reason is None:
        assert actual is None
    else:
        assert actual is not None
        assert actual.startswith(reason)


@pytest.mark.parametrize(
    ("driver", "cell", "check", "reason"),
    [
        ("torch", "ddp-fp32-w2-n2-checkpoints_node", "reshard", None),
        ("deepspeed", "zero2-fp32-w2-n2-checkpoints_node", "reshard", "each node has the shards of its own ranks, "),
        (
            "accelerate",
            "zero2-fp32-w2-n2-checkpoints_node",
            "portable",
            "the weights are exported on the node of rank 0 alone",
        ),
        (
            "torch",
            "ddp-fp32-w2-n2-checkpoints_node",
            "portable",
            "fsdp2 cannot go on from it: torch.distributed.checkpoint ",
        ),
        (
            "trainer",
            "ddp-fp32-w2-n2-checkpoints_node",
            "damage",
            "files are found as they are in fp32 without that option",
        ),
        (
            "trainer",
            "ddp-fp32-w2-n2-checkpoints_node",
            "paths",
            "files are found as they are in fp32 without that option",
        ),
        ("trainer", "ddp-fp32-w2-n2-checkpoints_node", "coverage", "data are loaded alike in all cells"),
    ],
)
def test_checks(driver: str, cell: str, check: str, reason: str | None) -> None:
    actual = CHECKS.get(check).not_applicable(Cell.parse(cell), DRIVERS.get(driver))
    assert_starts_with(actual, reason)


def test_the_first_rank_of_a_node() -> None:
    first_of_all = [World(rank, 4, rank % 2, "cpu").writes_first for rank in range(4)]
    assert first_of_all == [True, False, False, False]
    first_of_node = [World(rank, 4, rank % 2, "cpu", own_disks=True).writes_first for rank in range(4)]
    assert first_of_node == [True, False, True, False]


@pytest.mark.parametrize(
    ("cells", "worker_nodes", "shares"),
    [
        (["ddp-fp32-w2-n2-checkpoints_node"], 0, False),
        (["ddp-fp32-w2-n2-checkpoints_node", "ddp-fp32-w2-n2"], 0, True),
        (["ddp-fp32-w2-n2-checkpoints_node", "ddp-fp32-w2"], 0, False),
        # Runs of one cell are those of several workers, each on another node.
        (["ddp-fp32-w2-checkpoints_node"], 2, True),
    ],
)
def test_who_needs_a_shared_directory(
    cells: list[str], worker_nodes: int, shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "mark_of", lambda _: None)
    monkeypatch.setattr(packing, "case_of", lambda item: SimpleNamespace(cell=Cell.parse(item)))
    values = {"nodes": 1, "worker_nodes": worker_nodes}
    session: Any = SimpleNamespace(setting=lambda name: SimpleNamespace(value=values[name], origin=""))
    session.placement = ClusterPlacement(session)
    packing.note_spread(session, cells)  # type: ignore[arg-type]  # a cell stands for its item
    assert session.placement.shares is shares
