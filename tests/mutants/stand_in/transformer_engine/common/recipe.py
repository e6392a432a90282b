"""Recipes hold what they are given: nothing here scales anything."""

from __future__ import annotations

import enum
from typing import Any


class Format(enum.Enum):
    """The formats that accelerate looks up by name."""

    E4M3 = enum.auto()
    E5M2 = enum.auto()
    HYBRID = enum.auto()


class DelayedScaling:
    """The default recipe."""

    def __init__(self, **options: Any) -> None:
        self.options = options


class MXFP8BlockScaling(DelayedScaling):
    """Asked for by an option only."""
