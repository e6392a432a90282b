"""``init``: writes a suite, pytest settings and a workflow into a repository."""

from __future__ import annotations

import argparse
import json
import shlex
import string
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from pytest_distcompat import __version__
from pytest_distcompat.cli.output import named_in_errors
from pytest_distcompat.ext.scaffold.pytest_settings import relative
from pytest_distcompat.ext.scaffold.repository import DRIVERS, Class, Repository, inspect_repository
from pytest_distcompat.failures import UsageProblem

#: A link, since the installed package has no docs/.
ADOPT = "https://github.com/pytest-distcompat/pytest-distcompat/blob/main/docs/adopt.md"
#: The profile of a session without options, which takes seconds rather than minutes.
KEY, VALUE = "distcompat_profile", "smoke"
STRATEGIES: dict[str, tuple[str, ...]] = {
    "deepspeed": ("zero1", "zero3"),
    "torch": ("ddp", "fsdp2"),
}


class _Template(string.Template):
    """Text of a file to write. A dollar sign is GitHub's own."""

    delimiter = "@@"


def add(commands: Any) -> None:
    """Add the subcommand to the parser's."""
    init = commands.add_parser(
        "init",
        help="write the suite, the settings and the workflow into a repository",
        description="Find out what the repository has, write what it lacks, change no file.",
    )
    init.add_argument(
        "directory",
        type=Path,
        nargs="?",
        default=Path(),
        metavar="DIRECTORY",
        help="default: this one",
    )
    init.add_argument(
        "--driver",
        default="",
        metavar="NAME",
        help="a built-in driver, or module:attribute of your own",
    )
    init.add_argument(
        "--dry-run", action="store_true", help="say what would be written, write nothing"
    )
    init.set_defaults(call=_init)


def _init(options: argparse.Namespace) -> int:
    if not options.directory.is_dir():
        raise UsageProblem(f"{options.directory}: there is no such directory")
    _check_driver(options.driver)
    repository = inspect_repository(options.directory.resolve())
    files = dict(_files(repository, options.driver))
    for path, text in files.items():
        _write(repository.root, path, text, dry_run=options.dry_run)
    for line in _notes(repository, options.driver):
        print(line)
    print(
        "a red cell prints the line that declares it: paste that into expect, or mend the trainer"
    )
    suite = repository.tests / "test_distcompat.py"
    change_directory = ""
    if options.directory.resolve() != Path.cwd():
        change_directory = f"cd {shlex.quote(str(options.directory))} && "
    suite_argument = shlex.quote(str(suite))
    print(f"now: {change_directory}pytest {suite_argument}")
    return 0


def _check_driver(driver: str) -> None:
    """Raise UsageProblem for a malformed name of a driver.

    Whether it can be imported shows when tests run.
    """
    module, colon, attribute = driver.partition(":")
    if colon:
        identifiers = [attribute, *module.split(".")]
        if not all(map(str.isidentifier, identifiers)):
            raise UsageProblem(f"--driver {driver!r} is not right: expected module:attribute")
    elif driver:
        from pytest_distcompat.drivers import DRIVERS as BUILT_IN

        BUILT_IN.get(driver)


def _write(root: Path, path: Path, text: str, *, dry_run: bool) -> None:
    """Write a file unless it exists, and print what is done, or would be.

    ``path`` is relative to the root.
    """
    target = root / path
    if target.exists():
        print(f"kept {path}")
    elif dry_run:
        print(f"would write {path}")
    else:
        with named_in_errors(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
        print(f"wrote {path}")


@dataclass(frozen=True)
class _Suite:
    """What the suite to write tests: a driver, and the axes of its matrix.

    The driver is ``module:attribute`` or a built-in name.
    """

    driver: str
    strategies: tuple[str, ...]
    precisions: tuple[str, ...] = ("fp32", "bf16_upcast")


def _files(repository: Repository, chosen: str) -> Iterator[tuple[Path, str]]:
    """Yield the path and the text of each file that the repository should have.

    Paths are relative to the root.

    Args:
        repository: what the repository contains.
        chosen: the driver that the user asked for; empty if it is to be derived from the
            repository.
    """
    driver_file = _driver_text(repository, chosen)
    if driver_file:
        yield repository.tests / "distcompat_driver.py", driver_file
    suite_file = repository.tests / "test_distcompat.py"
    yield suite_file, _suite_text(_suite(repository, chosen))
    settings = repository.settings
    if not settings.exists:
        lines = [f"[{settings.table}]"]
        for setting in _pytest_settings(repository, chosen):
            lines.append(setting.line)
        text = "\n".join(lines)
        yield relative(settings.file, repository.root), f"{text}\n"
    if repository.on_github:
        yield (
            Path(".github/workflows/distcompat.yml"),
            _workflow_text(repository, chosen, suite_file),
        )


def _driver_text(repository: Repository, chosen: str) -> str:
    """Return the text of the driver to write; empty if there is a driver already."""
    loop = _loop(repository, chosen)
    if loop is not None:
        return _filled("loop.txt", module=loop.module)
    trainer = repository.trainer
    if not chosen and repository.driver is None and trainer is not None:
        return _filled("driver.txt", module=trainer.module, name=trainer.name)
    return ""


def _suite(repository: Repository, chosen: str) -> _Suite:
    """Return the driver and the axes of the suite to write."""
    loop = _loop(repository, chosen)
    if loop is not None:
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
        driver = DRIVERS[library]
    return _Suite(driver, strategies)


def _library(repository: Repository, chosen: str) -> str:
    """Return the library that the suite drives.

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
    return _filled(
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
        install = f". {install}"
    return _filled(
        "workflow.yml", install=install, version=__version__, tests=suite_file.as_posix()
    )


def _filled(template: str, **values: str) -> str:
    """Return the text of a template with its placeholders replaced."""
    file = resources.files(__package__) / "templates" / template
    return _Template(file.read_text("utf-8")).substitute(values)


def _loop(repository: Repository, chosen: str) -> Class | None:
    """Return the module with a loop in plain torch that needs a driver.

    None if there is something better to drive.
    """
    has_driver = bool(chosen) or repository.driver is not None or repository.trainer is not None
    if has_driver or repository.imports & {"transformers", "accelerate", "deepspeed"}:
        return None
    return repository.loop


def _tuple_text(names: tuple[str, ...]) -> str:
    """Return a tuple of names as Python writes it, in double quotes."""
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
class _PytestSetting:
    """A setting that pytest's configuration should have, with its line for the file."""

    key: str
    line: str


def _pytest_settings(repository: Repository, chosen: str) -> Iterator[_PytestSetting]:
    """Yield the settings that pytest's configuration should have."""
    settings = repository.settings
    yield _PytestSetting(KEY, settings.line(KEY, VALUE))
    directory = _missing_directory(repository, chosen)
    if directory and not repository.pythonpath:
        entry = relative(repository.root / directory, settings.file.parent)
        yield _PytestSetting("pythonpath", settings.line("pythonpath", str(entry), several=True))


def _missing_directory(repository: Repository, chosen: str) -> str:
    """Return the directory that ``sys.path`` lacks for the driver or its trainer.

    Empty if it lacks none.
    """
    on_path = _directories_on_path(repository)
    for imported in _imported_classes(repository, chosen):
        package = imported.module.partition(".")[0]
        if imported.top not in on_path and not _installed(package):
            return str(imported.top)
    return ""


def _imported_classes(repository: Repository, chosen: str) -> list[Class]:
    """Return the classes of the repository that the suite imports.

    They are a driver, or what a driver drives.
    """
    if not chosen:
        candidates = (repository.driver, repository.trainer, _loop(repository, chosen))
        return [candidate for candidate in candidates if candidate is not None]
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
    """Tell whether a module of that name is installed, outside the directory of this command."""
    for finder in sys.meta_path:
        path = sys.path[1:] if finder is PathFinder else None
        if finder.find_spec(name, path) is not None:
            return True
    return False


def _notes(repository: Repository, chosen: str) -> Iterator[str]:
    """Yield what is left for the user to do, a line each."""
    yield from repository.nameless
    yield from _settings_notes(repository, chosen)
    loop = _loop(repository, chosen)
    if loop is not None:
        todo = _filled("loop.txt", module=loop.module).count('"TODO')
        driver_file = repository.tests / "distcompat_driver.py"
        yield (
            f"{driver_file} is for the loop of {loop.module}: "
            f"fill in its {todo} TODOs, it fails until then"
        )
    elif repository.driver is None and repository.trainer is None:
        yield (
            "it drives the library with a tiny model; "
            f"for your own trainer write a driver ({ADOPT}) and name it there"
        )
    if not repository.on_github:
        yield (
            "no workflow was written: the repository is not on GitHub (no .github, no such remote)"
        )
    if repository.importlib_mode:
        yield (
            "pytest imports by importlib here: "
            f"for a driver in {repository.tests}, have it on pythonpath"
        )


def _settings_notes(repository: Repository, chosen: str) -> Iterator[str]:
    """Yield what is to be added by hand to settings of pytest that exist."""
    settings = repository.settings
    file_name = relative(settings.file, repository.root)
    if settings.exists:
        for setting in _pytest_settings(repository, chosen):
            if setting.key in settings.values:
                yield f"kept {setting.key} in {file_name}"
            else:
                yield f"add to [{settings.table}] in {file_name}: {setting.line}"
    directory = _missing_directory(repository, chosen)
    if directory and repository.pythonpath:
        entry = relative(repository.root / directory, settings.file.parent)
        yield (
            f"add {entry} to pythonpath in {file_name}: "
            "the driver or its trainer is imported from there"
        )
