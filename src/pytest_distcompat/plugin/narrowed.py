"""Whether a run was asked for a part of its tests only."""

from __future__ import annotations

import pytest


def narrowed(config: pytest.Config) -> bool:
    """By an expression, a node id, or what failed before; then what did not run says nothing."""
    names = ("keyword", "markexpr", "deselect", "lf", "stepwise")
    return any(config.getoption(name, None) for name in names) or any("::" in argument for argument in config.args)
