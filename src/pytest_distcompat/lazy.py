"""Public names of a package that are loaded when they are first asked for: many import the package, few use them all."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping


def lazily(package: str, home: Mapping[str, str]) -> Callable[[str], object]:
    """The package's ``__getattr__`` (https://peps.python.org/pep-0562/). ``home``: public name to the module that has it."""

    def fetch(name: str) -> object:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{package}.{home[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return fetch
