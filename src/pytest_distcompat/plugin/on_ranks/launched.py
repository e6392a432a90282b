"""The rank on which this pytest runs, if any, and what fixtures read there.

Every session imports this module.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pytest_distcompat.world import World

#: Set in the configuration of a session on a rank.
ON_RANK: pytest.StashKey[bool] = pytest.StashKey()
#: Whether an item, an ordinary test, starts ranks itself: how those ended then decides over an
#: xfail.
STARTS_RANKS: pytest.StashKey[bool] = pytest.StashKey()
WORLD: pytest.StashKey[World] = pytest.StashKey()
SHARED: pytest.StashKey[Path] = pytest.StashKey()
#: Set in the configuration of a rank that collects the tests it runs; any other runs the item of
#: its request.
COLLECTS: pytest.StashKey[bool] = pytest.StashKey()
#: Set on a rank for the processes that it starts: they inherit a launcher's variables, and are no
#: ranks.
HIDDEN = "DISTCOMPAT_INSIDE"


def hide_from_children() -> None:
    """Have the processes that this one starts not take themselves for ranks."""
    os.environ[HIDDEN] = "1"
