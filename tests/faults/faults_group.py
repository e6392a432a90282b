"""Importable in the faulty pytest and on its ranks: what the faults of all kinds have in common."""

from __future__ import annotations

from typing import Any

import pytest

two = pytest.mark.distcompat(world_size=2)
four = pytest.mark.distcompat(world_size=4)


def meet(size: int = 2) -> None:
    """All ranks do, but for those that have a fault."""
    import torch
    from torch import distributed

    distributed.all_reduce(torch.ones(size))


@two
def test_well(process_group: Any) -> None:
    """The first of each module: it warms up."""
    meet()
