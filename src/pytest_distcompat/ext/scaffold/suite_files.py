"""The files that ``distcompat init`` writes: their paths and texts, made from templates.

``command`` calls ``files_to_write`` with what the repository contains (``repository``), and writes
what is missing: a *driver*, the class by which the plugin builds and calls the user's trainer; a
*suite*, the test class that names the driver and the strategies to test; pytest's settings; and a
workflow for GitHub. The templates are in ``templates/``; ``@@name`` in them is replaced.
"""

from __future__ import annotations

import json
import string
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from pytest_distcompat import __version__
from pytest_distcompat.ext.scaffold.import_paths import loop_to_drive, missing_directory
from pytest_distcompat.ext.scaffold.pytest_settings import relative
from pytest_distcompat.ext.scaffold.repository import DRIVERS, Repository

#: The setting of pytest, and its value, by which a session without options takes seconds rather
#: than minutes.
KEY, VALUE = "distcompat_profile", "smoke"
#: Library -> the strategies that its suite tests; of another library they are ddp and fsdp2, and
#: zero2 if the repository uses DeepSpeed too.
STRATEGIES: dict[str, tuple[str, ...]] = {
    "deepspeed": ("zero1", "zero3"),
    "torch": ("ddp", "fsdp2"),
}


class _Template(string.Template):
    """Text of a file to write, with placeholders such as ``@@driver``.

    The usual ``$driver`` cannot be used: GitHub's workflows have dollar signs of their own.
    """

    delimiter = "@@"


@dataclass(frozen=True)
class _Suite:
    """What the suite to write tests: a driver, and the axes of its matrix."""

    #: ``module:attribute``, or a built-in name such as ``torch``.
    driver: str
    #: Such as ``("ddp", "fsdp2")``.
    strategies: tuple[str, ...]
    precisions: tuple[str, ...] = ("fp32", "bf16_upcast")


def files_to_write(repository: Repository, chosen: str) -> Iterator[tuple[Path, str]]:
    """Yield the path and the text of each file that the repository should have.

    Paths are relative to the root.

    Args:
        repository: What the repository contains.
        chosen: The driver that the user named by ``--driver``; empty if it is to be derived from
            the repository.
    """
    driver_file = _driver_text(repository, chosen)
    if driver_file:
        yield repository.tests / "distcompat_driver.py", driver_file
    suite_file = repository.tests / "test_distcompat.py"
    yield suite_file, _suite_text(_suite(repository, chosen))
    settings = repository.settings
    if not settings.exists:
        lines = [f"[{settings.table}]"]
        for setting in pytest_settings(repository, chosen):
            lines.append(setting.line)
        text = "\n".join(lines)
        yield relative(settings.file, repository.root), f"{text}\n"
    if repository.on_github:
        yield (
            Path(".github/workflows/distcompat.yml"),
            _workflow_text(repository, chosen, suite_file),
        )


def _driver_text(repository: Repository, chosen: str) -> str:
    """Return the text of the driver to write; empty if none is needed.

    One is written for a loop in plain torch, with TODOs in it, and for a subclass of Trainer.
    """
    # A training loop in plain torch, if there is nothing better to drive.
    loop = loop_to_drive(repository, chosen)
    if loop is not None:
        return filled("loop.txt", module=loop.module)
    trainer = repository.trainer
    if not chosen and repository.driver is None and trainer is not None:
        return filled("driver.txt", module=trainer.module, name=trainer.name)
    return ""


def _suite(repository: Repository, chosen: str) -> _Suite:
    """Return the driver and the axes of the suite to write."""
    loop = loop_to_drive(repository, chosen)
    if loop is not None:
        # ``loop.name`` is the strategy that the loop trains under, as ``ddp``.
        return _Suite(f"{_driver_module(repository)}:LoopDriver", (loop.name,), ("fp32",))
    library = _library(repository, chosen)
    strategies = STRATEGIES.get(library)
    if strategies is None:
        strategies = ("ddp", "fsdp2")
        if "deepspeed" in repository.imports:
            strategies += ("zero2",)
    if chosen:
        driver = chosen
    elif repository.driver is not None:
        driver = f"{repository.driver.module}:{repository.driver.name}"
    elif repository.trainer is not None:
        driver = f"{_driver_module(repository)}:Driver"
    else:
        # The built-in driver for that library: ``trainer`` for transformers.
        driver = DRIVERS[library]
    return _Suite(driver, strategies)


def _library(repository: Repository, chosen: str) -> str:
    """Return the library that the suite drives, such as ``accelerate``.

    It is torch if the repository imports none that is known.
    """
    # A chosen built-in driver drives its own library, whatever the code imports.
    for library, driver in DRIVERS.items():
        if driver == chosen:
            return library
    for library in DRIVERS:
        if library in repository.imports:
            return library
    return "torch"


def _suite_text(suite: _Suite) -> str:
    """Return the text of the suite's file."""
    return filled(
        "suite.txt",
        driver=suite.driver,
        strategies=_tuple_text(suite.strategies),
        precisions=_tuple_text(suite.precisions),
    )


def _workflow_text(repository: Repository, chosen: str, suite_file: Path) -> str:
    """Return the text of the workflow that runs the suite on GitHub."""
    extras = [_library(repository, chosen)]
    if "deepspeed" in repository.imports and "deepspeed" not in extras:
        extras.append("deepspeed")
    install = f"'pytest-distcompat[{','.join(extras)}]'"
    if repository.installs:
        # pip installs the repository itself too.
        install = f". {install}"
    return filled("workflow.yml", install=install, version=__version__, tests=suite_file.as_posix())


def filled(template: str, **values: str) -> str:
    """Return the text of a template with its placeholders replaced."""
    file = resources.files(__package__) / "templates" / template
    return _Template(file.read_text("utf-8")).substitute(values)


def _tuple_text(names: tuple[str, ...]) -> str:
    """Return a tuple of names as source: ``("ddp", "fsdp2")``, or ``("ddp",)`` for one."""
    elements = ", ".join(map(json.dumps, names))
    if len(names) == 1:
        elements += ","
    return f"({elements})"


def _driver_module(repository: Repository) -> str:
    """Return the module name under which pytest imports a driver in the tests' directory."""
    if (repository.root / repository.tests / "__init__.py").exists():
        return ".".join((*repository.tests.parts, "distcompat_driver"))
    return "distcompat_driver"


@dataclass(frozen=True)
class PytestSetting:
    """A setting that pytest's configuration should have."""

    #: Such as ``distcompat_profile``.
    key: str
    #: The line for the file: ``distcompat_profile = smoke``.
    line: str


def pytest_settings(repository: Repository, chosen: str) -> Iterator[PytestSetting]:
    """Yield the settings that pytest's configuration should have."""
    settings = repository.settings
    yield PytestSetting(KEY, settings.line(KEY, VALUE))
    # From which the driver or its trainer is imported, such as ``src``; empty if none is missing.
    directory = missing_directory(repository, chosen)
    if directory and not repository.pythonpath:
        entry = relative(repository.root / directory, settings.file.parent)
        yield PytestSetting("pythonpath", settings.line("pythonpath", str(entry), several=True))
