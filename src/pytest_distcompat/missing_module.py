"""Hint for an import that fails though the module lies in the repository.

pytest does not look in its directory.
"""

from __future__ import annotations

import sys
from pathlib import Path

#: Where repositories have their modules, below the root:
#: https://packaging.python.org/en/latest/discussions/src-layout-vs-flat-layout/.
_LAYOUTS = (".", "src")


def hint_of(error: BaseException | None, root: Path) -> str:
    """Return how pytest would find the module that was not found.

    It is empty for another error, or if the module is not in ``root``. Args: error: The exception,
    or what was raised because of it. root: The directory of the repository.
    """
    while error is not None and not isinstance(error, ModuleNotFoundError):
        error = error.__cause__
    name = error.name if error is not None else None
    # A module within a package was looked for in the package.
    if not name or "." in name:
        return ""
    on_path = {Path(entry or ".").resolve() for entry in sys.path}
    for layout in _LAYOUTS:
        directory = (root / layout).resolve()
        if directory in on_path:
            continue
        for path in (directory / f"{name}.py", directory / name):
            if _is_module(path):
                return (
                    f"{path} is there, and pytest does not look in its directory: "
                    f"add pythonpath = {layout} to pytest's settings"
                )
    return ""


def _is_module(path: Path) -> bool:
    """Tell whether the path is a file of Python, or a directory that has some."""
    if path.suffix == ".py":
        return path.is_file()
    return path.is_dir() and any(path.glob("*.py"))
