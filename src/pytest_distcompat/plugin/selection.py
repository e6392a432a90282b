"""Cases and node ids of items, and whether the user selected only a part of the tests.

Many modules of the plugin use these functions. A *case* is the parameter of an item of a suite (a
subclass of ``CompatSuite``): one *check* in one *cell*, as ``names`` in ``fsdp2-fp32-w2``. A cell
is a configuration: strategy, precision, 2 ranks. Under ``--dist loadgroup`` xdist appends a *group*
to the node ids of some tests, as in ``a.py::test_sum@gpu``. Names of this plugin never have it.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from pytest_distcompat.cell import Cell
from pytest_distcompat.report.compare import SELECTING

#: The part of a node id after the module's path, with the ``@group`` that xdist appends:
#: ``test_sum[a@b]@gpu``. The id of a parameter, in brackets, may contain an @ too.
_GROUPED = re.compile(r"(?P<item>[^\[@]*(\[.*\])?)@.*", re.DOTALL)


def case_of(item: pytest.Item) -> Any:
    """Return the case of a suite's item.

    None for any other test, and for the one item of a suite without selected cells.
    """
    callspec: Any = getattr(item, "callspec", None)
    if callspec is None:
        return None
    case = callspec.params.get("distcompat_case")
    return case if hasattr(case, "cell") else None


def cell_name(item: pytest.Item, cell: Cell) -> str:
    """Return the name of a cell of the item's suite, as ``a.py::TestA[fsdp2-fp32-w2]``."""
    assert item.parent is not None
    return f"{item.parent.nodeid}[{cell.id}]"


def strip_group(config: pytest.Config, nodeid: str) -> str:
    """Return the node id without the ``@group`` that xdist appends.

    Workers append it under ``--dist loadgroup`` to tests with the mark ``xdist_group``. Ranks,
    reports and the user's next command line use the id without it.
    """
    # In a worker --dist is "no"; xdist sets the option loadgroup there instead.
    in_controller = config.getoption("dist", "no") == "loadgroup"
    if not in_controller and not config.getoption("loadgroup", False):
        return nodeid
    path, colons, inside = nodeid.partition("::")
    match = _GROUPED.fullmatch(inside)
    if match is None:
        return nodeid
    return f"{path}{colons}{match['item']}"


def is_narrowed(config: pytest.Config) -> bool:
    """Tell whether tests were selected by an expression, a node id, or earlier failures.

    The user then wants to run just these, so that it is no news that others did not run.
    """
    for name in ("keyword", "markexpr", "deselect", "lf", "stepwise"):
        if config.getoption(name, None):
            return True
    return any("::" in argument for argument in config.args)


def is_partial(config: pytest.Config) -> bool:
    """Tell whether tests were selected in any way, also by paths or by this plugin's options.

    This is about *known issues*, bugs that a user has declared: one that excused nothing is listed
    as stale, but not if the tests that it is about were left out. It is not about the comparison
    with an earlier report, for which ``is_narrowed`` counts.
    """
    if is_narrowed(config):
        return True
    # The names of this plugin's options that select cells: ``strategies``, ``profile``, ...
    for name in SELECTING:
        if config.getoption(f"distcompat_{name}", None) is not None:
            return True
    return not _selects_all_paths(config)


def _selects_all_paths(config: pytest.Config) -> bool:
    """Tell whether the paths given cover the root directory, or all that ``testpaths`` names.

    A path covers what is below it.
    """
    start = config.invocation_params.dir
    given = {(start / argument).resolve() for argument in config.args}
    expected = set()
    for pattern in config.getini("testpaths"):
        for path in config.rootpath.glob(pattern):
            expected.add(path.resolve())
    if not expected:
        expected = {config.rootpath.resolve()}
    for path in expected:
        if given.isdisjoint((path, *path.parents)):
            return False
    return True
