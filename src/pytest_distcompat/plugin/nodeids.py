"""Node ids as pytest makes them."""

from __future__ import annotations

import re

import pytest

#: What follows the module's path, where xdist has put the name of a group behind it. A parameter's id may have an @ too.
_GROUPED = re.compile(r"(?P<item>[^\[@]*(\[.*\])?)@.*", re.DOTALL)


def strip_group(config: pytest.Config, nodeid: str) -> str:
    """Without the ``@group`` that xdist adds, in its workers, to tests with ``xdist_group`` under ``--dist loadgroup``.

    Ranks, reports and the user's next command line know the test without it.
    """
    # Workers are told by an option of their own: for them --dist is no.
    if config.getoption("dist", "no") != "loadgroup" and not config.getoption("loadgroup", False):
        return nodeid
    path, colons, inside = nodeid.partition("::")
    found = _GROUPED.fullmatch(inside)
    return f"{path}{colons}{found['item']}" if found else nodeid
