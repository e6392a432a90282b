"""Node ids without the group that xdist appends."""

from __future__ import annotations

import re

import pytest

#: The part after the module's path, with the ``@group`` that xdist appends. The id of a parameter may contain an @ too.
_GROUPED = re.compile(r"(?P<item>[^\[@]*(\[.*\])?)@.*", re.DOTALL)


def strip_group(config: pytest.Config, nodeid: str) -> str:
    """Return the node id without the ``@group`` that xdist appends.

    Workers append it under ``--dist loadgroup`` to tests with ``xdist_group``. Ranks, reports and the user's next command
    line use the id without it.
    """
    # In a worker --dist is "no"; xdist sets the option loadgroup there instead.
    if config.getoption("dist", "no") != "loadgroup" and not config.getoption("loadgroup", False):
        return nodeid
    path, colons, inside = nodeid.partition("::")
    match = _GROUPED.fullmatch(inside)
    return f"{path}{colons}{match['item']}" if match else nodeid
