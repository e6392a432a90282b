"""Hint for an import that fails though the module lies in the repository.

pytest imports test modules, and ranks import drivers. Neither looks in the repository's root or in
``src/`` unless pytest's setting ``pythonpath`` says so. When such an import fails, ``plugin`` adds
the hint to the message.
"""

from __future__ import annotations

import sys
from pathlib import Path

#: Where repositories have their modules, below the root:
#: https://packaging.python.org/en/latest/discussions/src-layout-vs-flat-layout/.
_LAYOUTS = (".", "src")


def hint_of(error: BaseException | None, root: Path) -> str:
    """Return how pytest would find the module that was not found.

    Args:
        error: The exception, or another one that was raised because of it.
        root: The directory of the repository.

    Returns:
        A sentence that names the missing setting; empty for another error, or if the module is not
        in the repository.
    """
    # An error of the plugin is raised from the ModuleNotFoundError.
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
