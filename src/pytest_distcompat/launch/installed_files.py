"""Tell installed files (Python's own, libraries) from the user's own code.

``at_import.Watch`` looks for modules of the user that read the clock or the rank's number at their
import: ranks that are forked after it would all have one value. It calls ``is_installed`` to tell
these modules from libraries. ``/venv/lib/python3.12/site-packages/numpy/__init__.py`` is installed,
``/home/me/project/conftest.py`` is not.
"""

from __future__ import annotations

import functools
import os
import site
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path


@functools.cache
def is_installed(file: str) -> bool:
    """Tell whether the file belongs to Python, to an installed library or to this package."""
    return os.path.realpath(file).startswith(_installed_in(tuple(sys.path)))


@functools.lru_cache(maxsize=4)
def _installed_in(path: tuple[str, ...]) -> tuple[str, ...]:
    """Return how the paths of installed files begin, for an interpreter with that ``sys.path``.

    For example ``/usr/lib/python3.12/``, ``/venv/lib/python3.12/site-packages/`` and, for a
    directory of ``pip install --target``, ``/srv/libraries/numpy/``.
    """
    directories = [
        sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")
    ]
    directories += [
        *site.getsitepackages(),
        site.getusersitepackages(),
        str(Path(__file__).parents[1]),
    ]
    prefixes = [_prefix(directory) for directory in directories]
    for entry in path:
        # An empty entry is the working directory. What the prefixes cover needs no second look.
        if not entry or _prefix(entry) in prefixes:
            continue
        # ``pip install --target DIRECTORY`` puts ``numpy-2.0.dist-info`` beside ``numpy``. The
        # directory may be the project's own, so only the files that dist-info lists are installed.
        for description in Path(entry).glob("*.dist-info"):
            prefixes += _listed(description)
    return tuple(prefixes)


def _prefix(directory: str) -> str:
    """Return how the paths of the files in a directory begin, without symbolic links."""
    return f"{os.path.realpath(directory)}{os.sep}"


def _listed(description: Path) -> Iterator[str]:
    """Yield how the paths begin that a distribution installed.

    It is the whole directory if the distribution has no list of its files.

    Args:
        description: The distribution's directory of metadata, as ``numpy-2.0.dist-info``. Its file
            ``RECORD`` has a line ``numpy/__init__.py,sha256=...,5412`` for each installed file.

    https://packaging.python.org/en/latest/specifications/recording-installed-packages/#the-record-file
    """
    directory = Path(os.path.realpath(description.parent))
    try:
        lines = (description / "RECORD").read_text(encoding="utf-8").splitlines()
    except OSError:
        yield f"{directory}{os.sep}"
        return
    # The first part of each path, with a slash for a directory and without one for a module's file.
    tops = set()
    for line in lines:
        path = line.split(",")[0].strip('"')
        name, separator, _ = path.partition("/")
        tops.add((name, separator))
    for name, separator in tops:
        # A path that begins with ".." is that of a script, outside of the directory.
        if name and name != "..":
            yield f"{directory / name}{os.sep if separator else ''}"
