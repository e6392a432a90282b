"""Driver that a command line names."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_distcompat.driver import Driver


def named(name: str) -> type[Driver]:
    """Return a built-in driver or ``module:attribute``; modules of the working directory are found. Raises UsageProblem."""
    from pytest_distcompat.drivers import find_driver

    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    return find_driver(name)
