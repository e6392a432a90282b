"""Lazy public names: a package imports the module of a name when the name is first used.

``pytest_distcompat``, ``drivers`` and ``ext.scripts`` use it: every pytest session imports this
package to find its plugin, while few need the modules behind names such as ``Driver``.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping


def lazily(package: str, home: Mapping[str, str]) -> Callable[[str], object]:
    """Return the package's ``__getattr__``: https://peps.python.org/pep-0562/.

    Args:
        package: The full name of the package.
        home: Public name -> the module of the package that has it: ``{"Driver": "drivers"}``.
    """

    def fetch(name: str) -> object:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{package}.{home[name]}"), name)
        # Python calls ``__getattr__`` only for a name that the module lacks, so not for this one
        # again.
        setattr(sys.modules[package], name, value)
        return value

    return fetch
