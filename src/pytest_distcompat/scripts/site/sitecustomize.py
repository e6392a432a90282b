"""Python imports this by itself at the start of each process of a launched script: it lets the probe in, and steps aside.

Nothing is to see it afterwards: it takes its directory off ``sys.path``, and the user's own ``sitecustomize`` is imported
as if it were the only one.
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
_RUN = "DISTCOMPAT_RUN"


class _OurPackage(importlib.abc.MetaPathFinder):
    """Finds this package, and nothing else, where the process's own environment does not have it (``uv run``)."""

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        del path, target
        if fullname != "pytest_distcompat":
            return None
        return importlib.machinery.PathFinder.find_spec(fullname, [str(_HERE.parents[2])])


def _step_aside() -> None:
    """The next ``sitecustomize`` on the path takes this one's place."""
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != _HERE]
    own = sys.modules.pop("sitecustomize")
    try:
        importlib.import_module("sitecustomize")
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        sys.modules.setdefault("sitecustomize", own)


def _let_in() -> None:
    """Never an error of the script's: what goes wrong is left where the parent looks for it."""
    sys.meta_path.append(_OurPackage())
    try:
        importlib.import_module("pytest_distcompat.scripts.enter").enter()
    except Exception:
        where = Path(os.environ.get(_RUN, ""), f"probe-{os.getpid()}.failed")
        with contextlib.suppress(OSError):
            where.write_text("at the start of the process:\n" + traceback.format_exc(), encoding="utf-8")


_let_in()
_step_aside()
