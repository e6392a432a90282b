"""Whether a launcher started this pytest as one rank of several: ``torchrun -m pytest``. Standard library only."""

from __future__ import annotations

import os

#: What torchrun, accelerate, deepspeed and composer's launcher all tell a rank.
_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
#: Set by pytest on a rank for the processes that it starts: they inherit the variables, and are no ranks.
_TAKEN = "DISTCOMPAT_INSIDE"


def here() -> bool:
    """Whether this process is a rank."""
    return all(name in os.environ for name in _VARIABLES) and _TAKEN not in os.environ


def first() -> bool:
    """Whether it is rank 0."""
    return os.environ["RANK"] == "0"


def hide() -> None:
    """This process is the rank; what it starts is not."""
    os.environ[_TAKEN] = "1"
