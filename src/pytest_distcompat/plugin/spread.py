"""Over how many nodes the tests of a session are spread."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pytest_distcompat.cell import uneven
from pytest_distcompat.plugin.marked import marker
from pytest_distcompat.plugin.selection import case_of

if TYPE_CHECKING:
    import pytest

    from pytest_distcompat.plugin.session import DistcompatSession


def note_nodes(session: DistcompatSession, items: Iterable[pytest.Item]) -> None:
    """Note in the session over how many nodes a test of it is spread at most, and whether one needs a directory of all nodes."""
    for item in items:
        mark, case = marker.mark_of(item), case_of(item)
        if mark is not None:
            size, nodes = marker.world_size_of(item, mark, session), marker.nodes_of(item, mark, session)
        elif case is not None:
            size, nodes = case.cell.world_size, case.cell.nodes
        else:
            continue
        if not uneven(size, nodes):
            session.nodes = max(session.nodes, nodes)
            # Runs of a suite go on from one another's files.
            shares = case is not None or "shared_dir" in getattr(item, "fixturenames", ())
            session.shares |= shares and (nodes > 1 or session.worker_nodes > 0)
