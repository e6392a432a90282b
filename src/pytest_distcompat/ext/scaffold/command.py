"""``init``: writes a suite, pytest settings and a workflow into a repository."""

from __future__ import annotations

import argparse
import json
import shlex
import string
import sys
from collections.abc import Iterator
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
STRATEGIES = {"deepspeed": ("zero1", "zero3"), "torch": ("ddp", "fsdp2")}


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
    init.add_argument("directory", type=Path, nargs="?", default=Path(), metavar="DIRECTORY", help="default: this one")
    init.add_argument("--driver", default="", metavar="NAME", help="a built-in driver, or module:attribute of your own")
    init.add_argument("--dry-run", action="store_true", help="say what would be written, write nothing")
    init.set_defaults(call=_init)


def _init(options: argparse.Namespace) -> int:
    if not options.directory.is_dir():
        raise UsageProblem(f"{options.directory}: there is no such directory")
    _check_driver(options.driver)
    found = inspect_repository(options.directory.resolve())
    files = dict(_files(found, options.driver))
    for path, text in files.items():
        target = found.root / path
        exists = target.exists()
        print(f"{'kept' if exists else 'would write' if options.dry_run else 'wrote'} {path}")
        if not exists and not options.dry_run:
            with named_in_errors(target):
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(text, encoding="utf-8")
    top = _missing_directory(found, options.driver)
    for line in _notes(found, top, options.driver):
        print(line)
    suite = found.tests / "test_distcompat.py"
    change_directory = (
        "" if options.directory.resolve() == Path.cwd() else f"cd {shlex.quote(str(options.directory))} && "
    )
    print("a red cell prints the line that declares it: paste that into expect, or mend the trainer")
    print(f"now: {change_directory}pytest {shlex.quote(str(suite))}")
    return 0


def _check_driver(driver: str) -> None:
    """Raise UsageProblem for a malformed name of a driver. Whether it can be imported shows when tests run."""
    module, colon, attribute = driver.partition(":")
    if colon and not (attribute.isidentifier() and all(part.isidentifier() for part in module.split("."))):
        raise UsageProblem(f"--driver {driver!r} is not right: expected module:attribute")
    if driver and not colon:
        from pytest_distcompat.drivers import DRIVERS as BUILT_IN

        BUILT_IN.get(driver)


def _files(found: Repository, chosen: str) -> Iterator[tuple[Path, str]]:
    library = next((name for name in DRIVERS if name in found.imports), "torch")
    # A chosen built-in driver drives its own library, whatever the code imports.
    library = next((name for name, driver in DRIVERS.items() if driver == chosen), library)
    driver = chosen or DRIVERS[library]
    driver_file = found.tests / "distcompat_driver.py"
    if not chosen and found.driver is not None:
        driver = f"{found.driver.module}:{found.driver.name}"
    elif not chosen and found.trainer is not None:
        driver = f"{_driver_module(found)}:Driver"
        yield driver_file, _filled("driver.txt", module=found.trainer.module, name=found.trainer.name)
    strategies = STRATEGIES.get(library, ("ddp", "fsdp2", *(("zero2",) if "deepspeed" in found.imports else ())))
    precisions: tuple[str, ...] = ("fp32", "bf16_upcast")
    loop = _loop(found, chosen)
    if loop is not None:
        driver, strategies, precisions = f"{_driver_module(found)}:LoopDriver", (loop.name,), ("fp32",)
        yield driver_file, _filled("loop.txt", module=loop.module)
    named = {"strategies": _tuple(strategies), "precisions": _tuple(precisions)}
    yield found.tests / "test_distcompat.py", _filled("suite.txt", driver=driver, **named)
    if not found.settings.exists:
        lines = [line for _, line in _settings_lines(found, chosen)]
        yield relative(found.settings.file, found.root), "\n".join((f"[{found.settings.table}]", *lines, ""))
    if found.on_github:
        extras = dict.fromkeys((library, *(("deepspeed",) if "deepspeed" in found.imports else ())))
        install = f"{'. ' if found.installs else ''}'pytest-distcompat[{','.join(extras)}]'"
        tests = (found.tests / "test_distcompat.py").as_posix()
        text = _filled("workflow.yml", install=install, version=__version__, tests=tests)
        yield Path(".github/workflows/distcompat.yml"), text


def _filled(template: str, **values: str) -> str:
    return _Template((resources.files(__package__) / "templates" / template).read_text("utf-8")).substitute(values)


def _loop(found: Repository, chosen: str) -> Class | None:
    """Return the module with a loop in plain torch that needs a driver; None if there is a better one."""
    plain = not found.imports & {"transformers", "accelerate", "deepspeed"}
    return found.loop if plain and not chosen and found.driver is None and found.trainer is None else None


def _tuple(names: tuple[str, ...]) -> str:
    return f"({json.dumps(names)[1:-1]}{',' * (len(names) == 1)})"


def _driver_module(found: Repository) -> str:
    """Return the module name under which pytest imports a driver in the tests' directory."""
    package = (found.root / found.tests / "__init__.py").exists()
    return ".".join((*(found.tests.parts if package else ()), "distcompat_driver"))


def _settings_lines(found: Repository, chosen: str) -> Iterator[tuple[str, str]]:
    """Yield the keys that pytest's settings should have, with their lines."""
    yield KEY, found.settings.line(KEY, VALUE)
    top = _missing_directory(found, chosen)
    if top and not found.pythonpath:
        entry = relative(found.root / top, found.settings.file.parent)
        yield "pythonpath", found.settings.line("pythonpath", str(entry), several=True)


def _missing_directory(found: Repository, chosen: str) -> str:
    """Return the directory that ``sys.path`` lacks for the driver or its trainer; empty if it lacks none."""
    # ``python -m pytest`` puts the working directory there, ``pytest`` does not.
    loop = _loop(found, chosen)
    modules = [(one.module, one.top) for one in (found.driver, found.trainer, loop) if one is not None]
    if chosen:
        module, _, attribute = chosen.partition(":")
        path = found.root / module.partition(".")[0]
        modules = [(module, Path())] if attribute and (path.is_dir() or path.with_suffix(".py").is_file()) else []
    on_path = {found.tests, *found.pythonpath}
    if not found.importlib_mode and any(
        (found.root / one).exists() for one in ("conftest.py", found.tests / "__init__.py")
    ):
        # https://docs.pytest.org/en/stable/explanation/pythonpath.html
        on_path.add(Path())
    return next(
        (str(top) for module, top in modules if top not in on_path and not _installed(module.partition(".")[0])), ""
    )


def _installed(name: str) -> bool:
    """Tell whether a module of that name is installed, outside the directory of this command."""
    ways = [(finder, sys.path[1:] if finder is PathFinder else None) for finder in sys.meta_path]
    return any(finder.find_spec(name, where) is not None for finder, where in ways)


def _notes(found: Repository, top: str, chosen: str) -> Iterator[str]:
    yield from found.nameless
    file = found.settings.file
    name = relative(file, found.root)
    for key, line in _settings_lines(found, chosen) if found.settings.exists else ():
        yield (
            f"kept {key} in {name}"
            if key in found.settings.values
            else f"add to [{found.settings.table}] in {name}: {line}"
        )
    if top and found.pythonpath:
        entry = relative(found.root / top, file.parent)
        yield f"add {entry} to pythonpath in {name}: the driver or its trainer is imported from there"
    if loop := _loop(found, chosen):
        todo = _filled("loop.txt", module=loop.module).count('"TODO')
        file_of_driver = found.tests / "distcompat_driver.py"
        yield f"{file_of_driver} is for the loop of {loop.module}: fill in its {todo} TODOs, it fails until then"
    elif found.driver is None and found.trainer is None:
        yield f"it drives the library with a tiny model; for your own trainer write a driver ({ADOPT}) and name it there"
    if not found.on_github:
        yield "no workflow was written: the repository is not on GitHub (no .github, no such remote)"
    if found.importlib_mode:
        yield f"pytest imports by importlib here: for a driver in {found.tests}, have it on pythonpath"
