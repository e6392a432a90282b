"""The rank on which this pytest runs, if any, and what fixtures read there.

A *rank* is one process of a torchrun process group. A distributed test runs on ranks: pytest's own
process requests them, and in each there is a pytest session that runs the one item of the request.
The same hooks and fixtures of the plugin run there as in pytest's own process, and tell by the
*stash* where they are. A stash is pytest's dictionary for the data of plugins, which configurations
and items have; its keys are the constants below.

Every session imports this module, so that it imports little.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pytest_distcompat.world import World

#: Set in the configuration of a session on a rank. A fork server, a process from which ranks are
#: forked, sets it too when it collects the tests, since its forks inherit that session.
ON_RANK: pytest.StashKey[bool] = pytest.StashKey()
#: Set in an item that is an ordinary test and starts ranks itself, as by the fixture for scripts.
#: If these crash or hang, an xfail mark does not excuse the test.
STARTS_RANKS: pytest.StashKey[bool] = pytest.StashKey()
#: On a rank, in the configuration: its number, the number of ranks and its device.
WORLD: pytest.StashKey[World] = pytest.StashKey()
#: On a rank, in the configuration: the directory that the fixture ``shared_dir`` returns.
SHARED: pytest.StashKey[Path] = pytest.StashKey()
#: Set in the configuration of a rank if torchrun started pytest itself (``torchrun -m pytest``):
#: such a rank collects tests and runs all of them. Any other rank runs the item of its request.
COLLECTS: pytest.StashKey[bool] = pytest.StashKey()
#: The environment variable by which a pytest that a rank starts knows that it is no rank itself
#: (``ext.inside``): it inherits the launcher's variables, such as RANK.
HIDDEN = "DISTCOMPAT_INSIDE"


def hide_from_children() -> None:
    """Set ``HIDDEN``: processes that this one starts must not take themselves for ranks."""
    os.environ[HIDDEN] = "1"
