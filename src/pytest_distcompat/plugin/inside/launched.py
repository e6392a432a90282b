"""The rank on which this pytest runs, if any, and what fixtures read there. Every session imports this module."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pytest_distcompat.world import World

#: Set in the configuration of a session on a rank.
ON_RANK: pytest.StashKey[bool] = pytest.StashKey()
#: Whether an item, an ordinary test, starts ranks itself: how those ended then decides over an xfail.
STARTS_RANKS: pytest.StashKey[bool] = pytest.StashKey()
WORLD: pytest.StashKey[World] = pytest.StashKey()
SHARED: pytest.StashKey[Path] = pytest.StashKey()
#: Variables that torchrun, accelerate, deepspeed and composer's launcher all set for a rank.
_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
#: Set on a rank for the processes that it starts: they inherit the variables, and are no ranks.
_HIDDEN = "DISTCOMPAT_INSIDE"


def is_rank() -> bool:
    """Tell whether a launcher started this process as one of several ranks."""
    return all(name in os.environ for name in _VARIABLES) and _HIDDEN not in os.environ


def hide_from_children() -> None:
    """Have the processes that this one starts not take themselves for ranks."""
    os.environ[_HIDDEN] = "1"
