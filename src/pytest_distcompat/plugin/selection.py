"""Cases and node ids of items, without the group that xdist appends, and whether the user selected only a part of the tests."""

from __future__ import annotations

import re
from typing import Any

import pytest

from pytest_distcompat.cell import Cell
from pytest_distcompat.report.compare import SELECTING

#: The part after the module's path, with the ``@group`` that xdist appends. The id of a parameter may contain an @ too.
_GROUPED = re.compile(r"(?P<item>[^\[@]*(\[.*\])?)@.*", re.DOTALL)


def case_of(item: pytest.Item) -> Any:
    """Return the case of a suite's item; None for any other test, and for the one item of a suite without selected cells."""
    case = item.callspec.params.get("distcompat_case") if hasattr(item, "callspec") else None
    return case if hasattr(case, "cell") else None


def cell_name(item: pytest.Item, cell: Cell) -> str:
    """Return the name of a cell of the item's suite."""
    assert item.parent is not None
    return f"{item.parent.nodeid}[{cell.id}]"


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


def is_narrowed(config: pytest.Config) -> bool:
    """Tell whether tests were selected by an expression, a node id, or earlier failures.

    Nothing can then be concluded from tests that did not run.
    """
    names = ("keyword", "markexpr", "deselect", "lf", "stepwise")
    return any(config.getoption(name, None) for name in names) or any("::" in argument for argument in config.args)


def is_partial(config: pytest.Config) -> bool:
    """Tell whether tests were selected in any way: also by paths below the root, or by this plugin's own options.

    A baseline counts tests that those leave out as missing; a known issue that covers only such tests is not stale.
    """
    selecting = any(config.getoption(f"distcompat_{name}", None) is not None for name in SELECTING)
    return is_narrowed(config) or selecting or not _selects_all_paths(config)


def _selects_all_paths(config: pytest.Config) -> bool:
    """Tell whether the paths given cover the root directory, or all that ``testpaths`` names."""
    start, root = config.invocation_params.dir, config.rootpath
    given = {(start / argument).resolve() for argument in config.args}
    expected = {path.resolve() for pattern in config.getini("testpaths") for path in root.glob(pattern)} or {
        root.resolve()
    }
    return all(any(path == parent or parent in path.parents for parent in given) for path in expected)
