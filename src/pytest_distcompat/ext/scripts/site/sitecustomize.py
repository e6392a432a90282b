"""Startup file of each Python process of a launched script: it starts the probe.

``launch`` puts the directory of this file, which has no other file, on PYTHONPATH. Python imports a
module named ``sitecustomize`` whenever an interpreter starts, so this one runs before the script.
It starts the *probe*, the code that records what the script trains (``instrumentation.enter``).
Then it removes its directory from ``sys.path``, and imports the ``sitecustomize`` that the user's
environment has, if any: the script has the ``sys.path`` that it would have without the probe.
"""

# ruff: noqa: INP001 - a directory of PYTHONPATH, no package

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import os
import sys
import traceback
from pathlib import Path

_HERE = Path(__file__).resolve().parent
#: The directory that has this package: ``src`` of a clone, or ``site-packages``.
_LIBRARY = _HERE.parents[3]
#: The variable by which ``launch`` names the run's directory, where the probe writes.
_RUN = "DISTCOMPAT_RUN"


class _OurPackage(importlib.abc.MetaPathFinder):
    """Finder of this package only.

    For processes whose own environment does not have the package (``uv run``).
    """

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        del path, target
        if fullname != "pytest_distcompat":
            return None
        return importlib.machinery.PathFinder.find_spec(fullname, [str(_LIBRARY)])


def _import_own_sitecustomize() -> None:
    """Import the next ``sitecustomize`` on the path in place of this one.

    Without another one this module stays in ``sys.modules``, since Python is importing it.
    """
    others = []
    for entry in sys.path:
        if Path(entry).resolve() != _HERE:
            others.append(entry)
    sys.path[:] = others
    own = sys.modules.pop("sitecustomize")
    try:
        importlib.import_module("sitecustomize")
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        sys.modules.setdefault("sitecustomize", own)


def _start_probe() -> None:
    """Start the probe.

    A failure is written to a file in the run's directory, which is read when the script has ended.
    It is never raised in the script.
    """
    sys.meta_path.append(_OurPackage())
    try:
        importlib.import_module("pytest_distcompat.ext.scripts.instrumentation").enter()
    except Exception:
        text = f"at the start of the process:\n{traceback.format_exc()}"
        file = Path(os.environ.get(_RUN, ""), f"probe-{os.getpid()}.failed")
        with contextlib.suppress(OSError):
            file.write_text(text, encoding="utf-8")


_start_probe()
_import_own_sitecustomize()
