"""Import hooks: they call a function when a module has been imported.

So a library is patched without importing it.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from pytest_distcompat.ext.scripts import guard

OnImport = Callable[[ModuleType], None]


class _ImportHook(importlib.abc.MetaPathFinder):
    """Finder that asks the other finders, and wraps the loader of a module that is waited for."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[OnImport]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self.waiting:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec: importlib.machinery.ModuleSpec | None = (
                find(fullname, path, target) if find is not None and finder is not self else None
            )
            if spec is not None:
                guard.attempt(f"the import of {fullname}", self._wrap_loader, spec.loader, fullname)
                return spec
        return None

    def _wrap_loader(self, loader: Any, name: str) -> None:
        if loader is None:
            return
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            # Restore the loader, which belongs to the module.
            del loader.exec_module
            execute(module)
            for function in self.waiting.pop(name, ()):
                guard.attempt(f"the import of {name}", function, module)

        loader.exec_module = exec_module


_import_hook = _ImportHook()


def on_import(name: str, function: OnImport) -> None:
    """Call ``function(module)`` when the module of that name has been imported.

    It is called at once if the module is imported already.
    """
    module = sys.modules.get(name)
    # importlib's own mark of a module whose import is still under way.
    unfinished = getattr(getattr(module, "__spec__", None), "_initializing", False)
    if module is not None and not unfinished:
        guard.attempt(f"the import of {name}", function, module)
        return
    if _import_hook not in sys.meta_path:
        sys.meta_path.insert(0, _import_hook)
    _import_hook.waiting.setdefault(name, []).append(function)
