"""Lazy public names: a package imports the module of a name when the name is first used."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping


def lazily(package: str, home: Mapping[str, str]) -> Callable[[str], object]:
    """Return the package's ``__getattr__``: https://peps.python.org/pep-0562/.

    ``home`` maps each public name to its module.
    """

    def fetch(name: str) -> object:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{package}.{home[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return fetch
