"""Tells whether the user selected only a part of the tests."""

from __future__ import annotations

import pytest

from pytest_distcompat.report.compare import SELECTING


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
