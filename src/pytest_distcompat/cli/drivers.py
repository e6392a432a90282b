"""The driver that a command line names."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_distcompat.driver import Driver


def named(name: str) -> type[Driver]:
    """A built-in one, or ``module:attribute``, which may lie in the working directory, as for ``python -m pytest``.

    Raises UsageProblem.
    """
    from pytest_distcompat.drivers import find_driver

    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    return find_driver(name)
