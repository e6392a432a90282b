"""Which directory of a repository Python cannot import the suite's classes from.

``distcompat init`` writes a test suite that imports a driver, or the trainer that a driver drives,
from the repository. ``suite_files`` and ``command`` ask ``missing_directory`` whether pytest would
find its module: if not, it belongs into pytest's setting ``pythonpath``. Nothing is imported or
run.
"""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from pathlib import Path

from pytest_distcompat.ext.scaffold.repository import Class, Repository


def missing_directory(repository: Repository, chosen: str) -> str:
    """Return the directory that ``sys.path`` lacks for the driver or its trainer: ``src``, say.

    Empty if it lacks none.

    Args:
        repository: What the repository contains.
        chosen: The driver that the user named by ``--driver``; empty without that option.
    """
    on_path = _directories_on_path(repository)
    for imported in _imported_classes(repository, chosen):
        package = imported.module.partition(".")[0]
        # ``top`` is the directory that holds the package, relative to the root.
        if imported.top not in on_path and not _installed(package):
            return str(imported.top)
    return ""


def _imported_classes(repository: Repository, chosen: str) -> list[Class]:
    """Return the classes of the repository that the suite imports.

    They are a driver, or what a driver drives: a subclass of Trainer, or a class beside a training
    loop.
    """
    if not chosen:
        candidates = (repository.driver, repository.trainer, loop_to_drive(repository, chosen))
        return [candidate for candidate in candidates if candidate is not None]
    # A built-in driver, such as ``torch``, has no colon. One of an installed package is not below
    # the root.
    module, _, attribute = chosen.partition(":")
    path = repository.root / module.partition(".")[0]
    in_root = path.is_dir() or path.with_suffix(".py").is_file()
    if attribute and in_root:
        return [Class(module, attribute)]
    return []


def _directories_on_path(repository: Repository) -> set[Path]:
    """Return the directories that ``pytest`` puts on ``sys.path``, relative to the root."""
    on_path = {repository.tests, *repository.pythonpath}
    if repository.importlib_mode:
        return on_path
    # ``python -m pytest`` puts the working directory there. ``pytest`` does only for a conftest.py
    # or a package of tests: https://docs.pytest.org/en/stable/explanation/pythonpath.html
    conftest = repository.root / "conftest.py"
    package = repository.root / repository.tests / "__init__.py"
    if conftest.exists() or package.exists():
        on_path.add(Path())
    return on_path


def _installed(name: str) -> bool:
    """Tell whether a module of that name is installed, outside the directory of this command.

    The first entry of ``sys.path`` is the directory of the script ``distcompat``, or the working
    directory under ``python -m``; pytest's process need not have it.
    """
    for finder in sys.meta_path:
        # Only PathFinder reads ``sys.path``. The others find built-in modules, for example.
        path = sys.path[1:] if finder is PathFinder else None
        if finder.find_spec(name, path) is not None:
            return True
    return False


def loop_to_drive(repository: Repository, chosen: str) -> Class | None:
    """Return a class beside a training loop in plain torch, for which a driver is to be written.

    None if there is something better to drive: a driver, a Trainer, or a library such as
    accelerate.
    """
    has_driver = bool(chosen) or repository.driver is not None or repository.trainer is not None
    if has_driver or repository.imports & {"transformers", "accelerate", "deepspeed"}:
        return None
    return repository.loop
