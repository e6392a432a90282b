"""Tells whether a launcher started this pytest as one of several ranks. Imports the standard library only."""

from __future__ import annotations

import os

#: Variables that torchrun, accelerate, deepspeed and composer's launcher all set for a rank.
_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
#: Set on a rank for the processes that it starts: they inherit the variables, and are no ranks.
_HIDDEN = "DISTCOMPAT_INSIDE"


def is_rank() -> bool:
    """Tell whether this process is a rank."""
    return all(name in os.environ for name in _VARIABLES) and _HIDDEN not in os.environ


def hide_from_children() -> None:
    """Have the processes that this one starts not take themselves for ranks."""
    os.environ[_HIDDEN] = "1"
