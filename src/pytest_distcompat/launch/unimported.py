"""Hide modules that a fork server has imported, until a rank imports them itself.

A fork server is a process that imports libraries, and from which ranks are forked. Code that uses
``torch.distributed.fsdp`` without importing it fails under torchrun, because ``import torch`` alone
does not make it an attribute. On a forked rank it would work, since the fork server has imported
that module. So such modules are hidden:

1. ``preload`` imports each library inside of ``with recorded("transformers")``. That records what
   each module imports.
2. ``server`` then calls ``hide()``. It takes the recorded modules out of ``sys.modules``, and out
   of their packages, whose attributes they are. What ``import torch`` brings stays, and so does
   what a module that stays has imported.
3. An import gives a module back, with all that it had imported. Its code does not run again. This
   is the work of ``_Finder``, an import hook (``sys.meta_path``).

A rank calls ``hide_again()`` when it starts, because multiprocessing has imported some modules in
it, before any code of the user's ran.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Container, Iterable, Iterator, Sequence
from types import ModuleType
from typing import Any

#: Modules of these packages stay. pytest rewrites the assertions of some modules, those of this
#: package included, and its import hook would execute their code again.
_STAY = ("pytest_distcompat", "pytest", "_pytest", "pluggy")

#: The *record*: name of each module that was loaded while imports were recorded -> the names of
#: modules that it imported.
_imported: dict[str, set[str]] = {}
#: The modules whose code runs, the innermost last.
_running: list[str] = []
#: The hidden modules, by name.
_hidden: dict[str, ModuleType] = {}
#: The names of hidden modules that were attributes of their packages. Others are not: a package may
#: give the name of a module to something else, as Lightning's ``__version__``, which is a text.
_were_attributes: set[str] = set()
#: Name of each module that the fork server was to import (``transformers``) -> the names of all
#: modules that are given back with it. They are computed in advance, because ranks import these
#: modules most, and to walk through the record on a rank would copy memory that it shares with the
#: fork server: reading a Python object writes its reference count.
_given_with: dict[str, tuple[str, ...]] = {}
#: The names of the modules that were given back, in order, and how many of them the fork server got
#: back itself (``keep_visible``).
_given_back: list[str] = []
_given_back_before = 0


@contextlib.contextmanager
def recorded(name: str) -> Iterator[None]:
    """Record what each module imports that is loaded in the block.

    Args:
        name: The module that the block imports.
    """
    # ``hide`` fills in the names.
    _given_with[name] = ()
    kinds = (importlib.machinery.SourceFileLoader, importlib.machinery.ExtensionFileLoader)
    with contextlib.ExitStack() as undo:
        for kind in kinds:
            _record_loader(kind, undo)
        _record_imports(undo)
        yield


def _record_loader(kind: Any, undo: contextlib.ExitStack) -> None:
    """Note each module that loaders of this class execute, as an import of the one that runs.

    Args:
        kind: A class of Python's loaders, whose ``exec_module`` is replaced.
        undo: Gets the function that puts it back.
    """
    execute = kind.exec_module
    # If the class inherits the method, the replacement is deleted at the end: the class gets no
    # method of its own.
    inherited = "exec_module" not in vars(kind)

    @functools.wraps(execute)
    def exec_module(loader: Any, module: ModuleType) -> None:
        name = module.__name__
        if _running:
            _imported[_running[-1]].add(name)
        _imported.setdefault(name, set())
        _running.append(name)
        try:
            execute(loader, module)
        finally:
            _running.pop()

    kind.exec_module = exec_module
    if inherited:
        undo.callback(delattr, kind, "exec_module")
    else:
        undo.callback(setattr, kind, "exec_module", execute)


def _record_imports(undo: contextlib.ExitStack) -> None:
    """Note which modules a running module imports that have been loaded already.

    No loader executes these, so ``import`` itself is replaced; ``undo`` gets the function that puts
    it back.
    """
    original = builtins.__import__

    # The parameters of ``builtins.__import__``, which callers may give by name.
    def record(
        name: str,
        globals: Any = None,  # noqa: A002
        locals: Any = None,  # noqa: A002
        fromlist: Any = (),
        level: int = 0,
    ) -> Any:
        module = original(name, globals, locals, fromlist, level)
        if _running:
            names = _imported[_running[-1]]
            if level:
                # A relative import, as ``from .layers import Linear``, whose ``name`` is not the
                # module's full name. If something is taken from the module, the import returns the
                # module itself. Else it returns the package, and the name stays unknown.
                name = module.__name__ if fromlist else ""
            names.add(name)
            # What is taken from a package may be a module of it. ``hide`` drops all other names.
            for item in fromlist or ():
                names.add(f"{name}.{item}")
        return module

    builtins.__import__ = record
    undo.callback(setattr, builtins, "__import__", original)


def _with_imported(names: Iterable[str], known: Container[str]) -> set[str]:
    """Return those of these modules that are known, and all known modules that they import.

    An import by way of another known module counts too.

    Args:
        names: Names of modules.
        known: The names that count: a container such as ``sys.modules``.
    """
    reached: set[str] = set()
    pending = list(names)
    while pending:
        name = pending.pop()
        if name in known and name not in reached:
            reached.add(name)
            pending.extend(_imported.get(name, ()))
    return reached


def _stays(name: str) -> bool:
    """Tell whether a recorded module stays visible.

    Modules of the standard library do, but not submodules such as ``concurrent.futures``.
    """
    return name.partition(".")[0] in _STAY or name in sys.stdlib_module_names


def hide() -> None:
    """Hide the modules that were recorded, but for those that a module which stays has imported.

    After that the record has names of recorded modules only, and each has its package.
    """
    for name, names in _imported.items():
        # An import of a module imports its package too. Of the names that were taken from modules
        # (``from os import path, sep``) only those of recorded modules are kept.
        names.add(name.rpartition(".")[0])
        names.intersection_update(_imported)
    # The modules that stay in any case, and then all that they have imported.
    roots = []
    for name in sys.modules:
        if name not in _imported or _stays(name):
            roots.append(name)
    stay = _with_imported(roots, sys.modules)
    hidden = []
    for name in sys.modules:
        if name in _imported and name not in stay:
            hidden.append(name)
    _hide(hidden)
    for name in _given_with:
        _given_with[name] = tuple(_with_imported([name], _hidden))
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _hide(names: Sequence[str]) -> None:
    """Take these modules out of ``sys.modules``, and out of the attributes of their packages."""
    for name in names:
        module = sys.modules.pop(name, None)
        if module is not None:
            _hidden[name] = module
    for name in names:
        package, _, attribute = name.rpartition(".")
        parent = loaded(package)
        if parent is not None and name in _hidden and vars(parent).get(attribute) is _hidden[name]:
            delattr(parent, attribute)
            _were_attributes.add(name)


def keep_visible() -> None:
    """Leave to ranks what has been given back so far.

    A fork server calls it before it serves: the user's test modules, which it has collected, have
    imported these modules, and ranks inherit the test modules.
    """
    global _given_back_before  # noqa: PLW0603 - a process has one
    _given_back_before = len(_given_back)


def hide_again() -> None:
    """Hide what has been given back since ``keep_visible``, in a rank that is about to start.

    multiprocessing needed it to start the rank. No code of the user's has run yet.
    """
    _hide(_given_back[_given_back_before:])
    del _given_back[_given_back_before:]


def loaded(name: str) -> ModuleType | None:
    """Return the module of that name if this process has loaded it, also if it is hidden."""
    return sys.modules.get(name) or _hidden.get(name)


def _give_back(name: str) -> None:
    """Put a module, and what it had imported, back into ``sys.modules`` and into its package."""
    names = _given_with.get(name)
    if not names:
        names = tuple(_with_imported([name], _hidden))
    for imported in names:
        if imported not in _hidden:
            continue
        module = _hidden[imported]
        sys.modules[imported] = module
        package, _, attribute = imported.rpartition(".")
        parent = loaded(package)
        if parent is not None and imported in _were_attributes:
            setattr(parent, attribute, module)
        del _hidden[imported]
        _given_back.append(imported)


class _Finder(importlib.abc.MetaPathFinder):
    """Import hook that finds hidden modules; Python asks it before all other finders."""

    def find_spec(
        self,
        name: str,
        path: object = None,  # noqa: ARG002
        target: object = None,  # noqa: ARG002
    ) -> importlib.machinery.ModuleSpec | None:
        """Return a spec like the module's own whose loader gives it back."""
        module = _hidden.get(name)
        if module is None:
            return None
        spec = importlib.machinery.ModuleSpec(name, _Loader(module))
        original = module.__spec__
        if original is not None:
            spec.origin = original.origin
            spec.submodule_search_locations = original.submodule_search_locations
            spec.has_location = original.has_location
            spec.cached = original.cached
        return spec


class _Loader(importlib.abc.Loader):
    """Loader that gives a hidden module back.

    Any other attribute, as ``get_source``, is that of the module's own loader.
    """

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._spec = module.__spec__

    def create_module(self, spec: object) -> ModuleType:  # noqa: ARG002
        """Return the module that was loaded before."""
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """Give back what it imported. Its code does not run again."""
        module.__spec__ = self._spec
        name = module.__name__
        if name not in _hidden:
            # The module has set its ``__name__`` to another one. Its spec has the name by which it
            # was imported.
            name = self._spec.name if self._spec is not None else ""
        _give_back(name)

    def __getattr__(self, name: str) -> Any:
        loader = None
        if self._spec is not None:
            loader = self._spec.loader
        return getattr(loader, name)
