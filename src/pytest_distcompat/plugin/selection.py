"""Whether a run was asked for a part of its tests only."""

from __future__ import annotations

import pytest

from pytest_distcompat.report.compare import SELECTING


def narrowed(config: pytest.Config) -> bool:
    """By an expression, a node id, or what failed before; then what did not run says nothing."""
    names = ("keyword", "markexpr", "deselect", "lf", "stepwise")
    return any(config.getoption(name, None) for name in names) or any("::" in argument for argument in config.args)


def partial(config: pytest.Config) -> bool:
    """Also by paths below the root, or by our own options: a baseline counts what they leave out, a known issue does not."""
    selecting = any(config.getoption(f"distcompat_{name}", None) is not None for name in SELECTING)
    return narrowed(config) or selecting or not _whole(config)


def _whole(config: pytest.Config) -> bool:
    """Whether the root's tests were asked for: by its own path, or by all that ``testpaths`` names."""
    here, root = config.invocation_params.dir, config.rootpath
    given = {(here / argument).resolve() for argument in config.args}
    usual = {path.resolve() for pattern in config.getini("testpaths") for path in root.glob(pattern)} or {
        root.resolve()
    }
    return all(any(path == one or one in path.parents for one in given) for path in usual)
