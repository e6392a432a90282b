"""Tests that run on two nodes."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from torch import distributed

pytestmark = pytest.mark.distcompat(world_size=2, nodes=2)


def test_sum(process_group: object, rank: int) -> None:
    total = torch.tensor(float(rank))
    distributed.all_reduce(total)
    assert total.item() == 1


def test_shared(process_group: object, rank: int, shared_dir: Path) -> None:
    if rank == 1:
        (shared_dir / "written").touch()
    distributed.barrier()
    assert (shared_dir / "written").exists()


def test_environment(process_group: object, rank: int) -> None:
    Path(os.environ["SEEN"], f"rank-{rank}").write_text(json.dumps(dict(os.environ)))


def test_assertion(process_group: object, rank: int) -> None:
    assert rank == 0, "one is wrong"


def test_killed(process_group: object, rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    distributed.barrier()


@pytest.mark.distcompat(world_size=2, nodes=2, timeout=4)
def test_hang(process_group: object, rank: int) -> None:
    if rank == 1:
        time.sleep(60)
    distributed.barrier()


def test_skip_on_both() -> None:
    pytest.skip("not today")


def test_skip_on_one(process_group: object, rank: int) -> None:
    if rank == 1:
        pytest.skip("not here")
    distributed.barrier()


@pytest.mark.distcompat(world_size=2, nodes=1)
def test_one_node(rank: int) -> None:
    assert os.environ["GROUP_WORLD_SIZE"] == "1"
