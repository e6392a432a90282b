"""Import hooks: they call a function when a module has been imported, to patch its functions.

The probe must wrap ``torch.save`` in a script, and must not import torch itself: a process of the
script may never need it. So it says ``on_import("torch", patch)`` at the start of the process, and
``patch(torch)`` is called right after the script's own ``import torch``.

Python asks the finders in ``sys.meta_path`` for each module. Ours comes first. For a module that is
waited for it asks the others, and replaces ``exec_module`` of the loader that they return, once.

All that the probe does is called by ``guard.attempt``: an exception of the probe is logged, and
does not reach the script.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from pytest_distcompat.ext.scripts import guard

#: Called with the module that was imported.
OnImport = Callable[[ModuleType], None]


class _ImportHook(importlib.abc.MetaPathFinder):
    """Finder that asks the other finders, and wraps the loader of a module that is waited for."""

    def __init__(self) -> None:
        #: Name of a module that is not imported yet -> what to call then.
        self.waiting: dict[str, list[OnImport]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return what another finder finds, with a wrapped loader; None for modules not waited for.

        Python calls this for each module that is not imported yet.
        """
        if fullname not in self.waiting:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            if find is None or finder is self:
                continue
            spec: importlib.machinery.ModuleSpec | None = find(fullname, path, target)
            if spec is not None:
                guard.attempt(f"the import of {fullname}", self._wrap_loader, spec.loader, fullname)
                return spec
        return None

    def _wrap_loader(self, loader: Any, name: str) -> None:
        """Have the loader call the waiting functions after it has executed the module."""
        if loader is None:
            # A namespace package has no code to execute.
            return
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            # This takes the attribute off the object again, so that the method of its class counts:
            # the module keeps the loader (``__loader__``), and others may use it.
            del loader.exec_module
            execute(module)
            for function in self.waiting.pop(name, ()):
                guard.attempt(f"the import of {name}", function, module)

        loader.exec_module = exec_module


#: The finder of this process, in ``sys.meta_path`` since the first ``on_import`` that waits.
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
