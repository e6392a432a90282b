"""The command ``distcompat init``: writes a test suite, settings and a workflow into a repository.

The command line calls ``add`` by the entry point group ``pytest_distcompat.commands``, and
``_init`` with the parsed options. It reads the repository (``repository``), writes files that do
not exist yet (``suite_files``), changes none, and prints what it did and what is left for the user
to do.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pytest_distcompat.cli.output import named_in_errors
from pytest_distcompat.ext.scaffold.import_paths import loop_to_drive, missing_directory
from pytest_distcompat.ext.scaffold.pytest_settings import relative
from pytest_distcompat.ext.scaffold.repository import Repository, inspect_repository
from pytest_distcompat.ext.scaffold.suite_files import files_to_write, filled, pytest_settings
from pytest_distcompat.failures import UsageProblem

#: The page for users who write a driver. A link, since the installed package has no docs/.
ADOPT = "https://github.com/pytest-distcompat/pytest-distcompat/blob/main/docs/adopt.md"


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
    """Write what the repository lacks, print notes and the command to run next, and return 0."""
    if not options.directory.is_dir():
        raise UsageProblem(f"{options.directory}: there is no such directory")
    _check_driver(options.driver)
    repository = inspect_repository(options.directory.resolve())
    files = dict(files_to_write(repository, options.driver))
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
    """Raise UsageProblem for a malformed name of a driver, or an unknown built-in one.

    Whether ``module:attribute`` can be imported shows when tests run.
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


def _notes(repository: Repository, chosen: str) -> Iterator[str]:
    """Yield what is left for the user to do, a line each.

    Args:
        repository: What the repository contains.
        chosen: The driver that the user named by ``--driver``; empty without that option.
    """
    # Messages about classes in files that no import statement can name, such as ``train-gpt.py``.
    yield from repository.nameless
    yield from _settings_notes(repository, chosen)
    loop = loop_to_drive(repository, chosen)
    if loop is not None:
        # ``filled`` returns the text of the driver that was written from the template ``loop.txt``.
        todo = filled("loop.txt", module=loop.module).count('"TODO')
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
    """Yield what is to be added by hand to settings of pytest that exist.

    Where the repository has no file with settings, ``files_to_write`` has made one.
    """
    settings = repository.settings
    file_name = relative(settings.file, repository.root)
    if settings.exists:
        for setting in pytest_settings(repository, chosen):
            if setting.key in settings.values:
                yield f"kept {setting.key} in {file_name}"
            else:
                yield f"add to [{settings.table}] in {file_name}: {setting.line}"
    # The directory of the driver or trainer, if pytest would not find it: ``src``. Without a
    # ``pythonpath`` in the settings it is among ``pytest_settings`` above.
    directory = missing_directory(repository, chosen)
    if directory and repository.pythonpath:
        entry = relative(repository.root / directory, settings.file.parent)
        yield (
            f"add {entry} to pythonpath in {file_name}: "
            "the driver or its trainer is imported from there"
        )
