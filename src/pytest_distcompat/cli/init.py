"""``init``: the ten lines, the settings and the workflow, written into a repository that has none of them."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from pytest_distcompat.cli.repository import DRIVERS, Class, Repository, look_at
from pytest_distcompat.failures import UsageProblem

#: Who installed the package has no docs/.
ADOPT = "https://github.com/pytest-distcompat/pytest-distcompat/blob/main/docs/adopt.md"
SUITE = '''"""Does the trainer still train the same model under every strategy? https://github.com/pytest-distcompat/pytest-distcompat"""

from pytest_distcompat import CompatSuite, Matrix


class TestDistcompat(CompatSuite):
    driver = "{driver}"
    matrix = Matrix(strategies=({strategies}), precisions=("fp32", "bf16_mixed"))
'''
DRIVER = '''"""The trainer under test; what its own arguments are goes through make_trainer."""

from pytest_distcompat.drivers.trainer import TrainerDriver


class Driver(TrainerDriver):
    name = "{name}"

    def make_trainer(self, **settings):
        from {module} import {name}

        return {name}(**settings)
'''
WORKFLOW = """name: distcompat
on:
  pull_request:
  schedule: [{{cron: "41 2 * * *"}}]
  workflow_dispatch:
permissions:
  contents: read
jobs:
  cpu:
    # Each strategy once in a pull request, the whole matrix at night. For GPUs: a runner that has some, and gpus: its number.
    runs-on: ubuntu-latest
    timeout-minutes: 60
    steps:
      - uses: actions/checkout@v4
      - uses: actions/setup-python@v5
        with: {{python-version: "3.12"}}
      - run: pip install torch --index-url https://download.pytorch.org/whl/cpu
      - run: pip install {install}
      - uses: pytest-distcompat/pytest-distcompat/.github/actions/distcompat@main
        with:
          tests: {tests}
          gpus: "0"
          profile: ${{{{ github.event_name == 'pull_request' && 'smoke' || 'default' }}}}
"""
#: What a run without options takes: seconds rather than minutes.
KEY, VALUE = "distcompat_profile", "smoke"
STRATEGIES = {"deepspeed": ("zero1", "zero3"), "torch": ("ddp", "fsdp2")}


def add(commands: Any) -> None:
    """Add the subcommand to the parser's."""
    init = commands.add_parser(
        "init",
        help="write the suite, the settings and the workflow into a repository",
        description="Find out what the repository has, write what it lacks, change no file but pytest's settings.",
    )
    init.add_argument("directory", type=Path, nargs="?", default=Path(), metavar="DIRECTORY", help="default: this one")
    init.add_argument("--driver", default="", metavar="NAME", help="a built-in driver, or module:attribute of your own")
    init.add_argument("--dry-run", action="store_true", help="say what would be written, write nothing")
    init.set_defaults(call=_init)


def _init(told: argparse.Namespace) -> int:
    if not told.directory.is_dir():
        raise UsageProblem(f"{told.directory}: there is no such directory")
    found = look_at(told.directory.resolve())
    files = dict(_files(found, told.driver))
    for path, text in files.items():
        there = (found.root / path).exists()
        print(f"{'kept' if there else 'wrote'} {path}")  # noqa: T201 - a command speaks
        if not there and not told.dry_run:
            (found.root / path).parent.mkdir(parents=True, exist_ok=True)
            (found.root / path).write_text(text, encoding="utf-8")
    _set(found, KEY, VALUE, write=not told.dry_run)
    top = _not_importable(found, told.driver)
    if top and not found.pythonpath:
        _set(found, "pythonpath", top, write=not told.dry_run)
    suite = found.tests / "test_distcompat.py"
    for line in _notes(found, top):
        print(line)  # noqa: T201 - a command speaks
    print(f"now: pytest {suite}")  # noqa: T201 - a command speaks
    return 0


def _files(found: Repository, asked: str) -> Iterator[tuple[Path, str]]:
    library = next((name for name in DRIVERS if name in found.imports), "torch")
    driver = asked or DRIVERS[library]
    own = found.tests / "distcompat_driver.py"
    if not asked and found.driver is not None:
        driver = f"{found.driver.module}:{found.driver.name}"
    elif not asked and found.trainer is not None:
        driver = f"{_beside(found)}:Driver"
        yield own, _driver(found.trainer)
    strategies = STRATEGIES.get(library, ("ddp", "fsdp2", *(("zero2",) if "deepspeed" in found.imports else ())))
    yield found.tests / "test_distcompat.py", SUITE.format(driver=driver, strategies=json.dumps(strategies)[1:-1])
    if found.on_github:
        extras = dict.fromkeys((library, *(("deepspeed",) if "deepspeed" in found.imports else ())))
        install = f"{'. ' if found.installs else ''}'pytest-distcompat[{','.join(extras)}]'"
        text = WORKFLOW.format(install=install, tests=(found.tests / "test_distcompat.py").as_posix())
        yield Path(".github/workflows/distcompat.yml"), text


def _driver(trainer: Class) -> str:
    return DRIVER.format(module=trainer.module, name=trainer.name)


def _beside(found: Repository) -> str:
    """The module of a driver in the tests' directory, as pytest has it imported."""
    package = (found.root / found.tests / "__init__.py").exists()
    return ".".join((*(found.tests.parts if package else ()), "distcompat_driver"))


def _set(found: Repository, key: str, value: str, *, write: bool) -> None:
    """Put a key into pytest's settings, right below the head of their table; leave all else as it is."""
    path = found.root / found.settings
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    if re.search(rf"^\s*{key}\s*=", text, re.MULTILINE):
        print(f"kept {key} in {found.settings}")  # noqa: T201 - a command speaks
        return
    told = f'"{value}"' if path.suffix == ".toml" else value
    if key == "pythonpath" and path.suffix == ".toml" and found.table != "tool.pytest.ini_options":
        # There it is a list and nothing else.
        told = f"[{told}]"
    head, line = f"[{found.table}]", f"{key} = {told}"
    lines = text.splitlines()
    place = next((number for number, one in enumerate(lines) if one.strip() == head), -1)
    if place < 0:
        lines += [*([""] if lines else []), head]
        place = len(lines) - 1
    lines.insert(place + 1, line)
    if write:
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"set {line} in {found.settings}")  # noqa: T201 - a command speaks


def _not_importable(found: Repository, asked: str) -> str:
    """The directory that ``sys.path`` lacks where ``pytest`` imports the driver or its trainer; empty if it lacks none.

    ``python -m pytest`` puts the working directory there, ``pytest`` does not.
    """
    own = [(one.module, one.top) for one in (found.driver, found.trainer) if one is not None]
    if asked:
        module, _, attribute = asked.partition(":")
        path = found.root / module.partition(".")[0]
        own = [(module, Path())] if attribute and (path.is_dir() or path.with_suffix(".py").is_file()) else []
    put_there = {found.tests, *map(Path, found.pythonpath)}
    if not found.importlib_mode and any(
        (found.root / one).exists() for one in ("conftest.py", found.tests / "__init__.py")
    ):
        # https://docs.pytest.org/en/stable/explanation/pythonpath.html
        put_there.add(Path())
    return next(
        (str(top) for module, top in own if top not in put_there and not _installed(module.partition(".")[0])), ""
    )


def _installed(name: str) -> bool:
    """Whether a module of that name is found without this command's directory or the working directory, which comes first."""
    ways = [(finder, sys.path[1:] if finder is PathFinder else None) for finder in sys.meta_path]
    return any(finder.find_spec(name, where) is not None for finder, where in ways)


def _notes(found: Repository, top: str) -> Iterator[str]:
    if top and found.pythonpath:
        yield f"add {top} to pythonpath in {found.settings}: the driver or its trainer is imported from there"
    if found.driver is None and found.trainer is None:
        yield f"it drives the library with a tiny model; for your own trainer write a driver ({ADOPT}) and name it there"
    if not found.on_github:
        yield "no workflow was written: the repository is not on GitHub (no .github, no such remote)"
    if found.importlib_mode:
        yield f"pytest imports by importlib here: for a driver in {found.tests}, have it on pythonpath"
