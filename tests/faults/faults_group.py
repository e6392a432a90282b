"""Importable in the faulty pytest and on its ranks: what the faults of all kinds have in common."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

#: Of all tests of this run, where it is given; else most are on 2 ranks and some on 4.
SIZE = int(os.environ.get("FAULTS_WORLD_SIZE", "0"))
two = pytest.mark.distcompat(world_size=SIZE or 2)
four = pytest.mark.distcompat(world_size=SIZE or 4)
#: Ranks of a test on ``four``: 3 and 2 there, 1 and 0 where there are but 2.
LAST = (SIZE or 4) - 1
LAST_BUT_ONE = LAST - 1


def meet(size: int = 2) -> None:
    """All ranks do, but for those that have a fault."""
    import torch
    from torch import distributed

    distributed.all_reduce(torch.ones(size))


def await_error(rank: int, shared_dir: Path) -> None:
    """Wait until that rank has written its failure or skip: a busy machine takes longer for that than any sleep."""
    rank_log = shared_dir.parent / f"rank-{rank}.jsonl"
    while not (
        rank_log.exists() and any(word in rank_log.read_text(encoding="utf-8") for word in ('"error"', '"excused"'))
    ):
        time.sleep(0.001)


@two
def test_well(process_group: Any) -> None:
    """The first of each module: it warms up. As the last one, ``test_well_after_all``, it says how long a launch takes."""
    meet()
