"""Extensions can be deleted: without the folder of one, or of all, everything else works."""

from __future__ import annotations

import argparse
import ast
import importlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest
from tests.all_options import ALL_OPTIONS, options_without
from tests.house.test_floors import imports_of, name_of, ours

import pytest_distcompat
from pytest_distcompat import hookspecs
from pytest_distcompat import suite as collected
from pytest_distcompat.drivers import DRIVERS, TinyDriver
from pytest_distcompat.ext.upstream import suites
from pytest_distcompat.settings import Source

SOURCE = Path(pytest_distcompat.__file__).parent
ROOT = Path(__file__).parents[2]
EXTENSIONS = sorted(path.name for path in (SOURCE / "ext").iterdir() if (path / "__init__.py").exists())
#: Modules and packages beside the folder that belong to an extension: the names by which users import it.
FACES = {
    "aliases": ["aliases.py"],
    "cluster": ["executors.py"],
    "scripts": ["scripts.py"],
    "upstream": [
        "suite.py",
        "settings.py",
        "drivers/tiny.py",
        *(f"drivers/{name}/__init__.py" for name in ("accelerate", "deepspeed", "torch", "trainer")),
    ],
}
#: Names of what only an extension knows: of its options, arguments and ideas.
FLAGS = {
    "reuse",
    "reuse_limit",
    "reuse_scope",
    "simulate",
    "agrees_with",
    "walk_calls",
    "sources",
    "OTHER_REFERENCE",
    "WALK",
}
#: Extensions that are built on others, and go with them.
NEEDS = {"search": {"reach", "walk", "upstream"}, "walk": {"upstream"}}

MARKED = """
import pytest

@pytest.mark.distcompat(world_size=2)
def test_sum(process_group, rank):
    import torch
    from torch import distributed
    total = torch.tensor([rank + 1])
    distributed.all_reduce(total)
    assert total.item() == 3

@pytest.mark.distcompat(world_size=2)
def test_fails(rank):
    assert rank == 0
"""

#: A trainer of a user's, its driver and the suite.
EXAMPLE = SOURCE.parents[1] / "examples" / "my_trainer"
SUITE = """
from pytest_distcompat import CompatSuite, Matrix


class TestMine(CompatSuite):
    driver = "my_driver:MyDriver"
    matrix = Matrix(strategies=("ddp",), precisions=("fp32",))
"""


@dataclass(frozen=True)
class Copy:
    """A copy of the package without some extensions, installed in an environment of its own."""

    python: Path
    directory: Path

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run ``python -m pytest`` there."""
        return self.run_module("pytest", "-p", "no:randomly", *arguments)

    def run_module(self, module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run ``python -m MODULE`` there."""
        environment = {**os.environ, "PYTHONPATH": str(self.directory)}
        environment.pop("PYTEST_ADDOPTS", None)
        command = [str(self.python), "-m", module, *arguments]
        return subprocess.run(
            command, cwd=self.directory, env=environment, capture_output=True, text=True, timeout=300, check=False
        )


def install_without(extensions: list[str], directory: Path) -> Copy:
    """Make an environment with all packages of this one, and of ours a copy without these extensions."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(directory / "venv")], check=True)
    site = next((directory / "venv").glob("lib/python*/site-packages"))
    for place in {Path(sysconfig.get_path("purelib")), *map(Path, filter(is_site, sys.path))}:
        for entry in place.iterdir():
            target = site / entry.name
            if "pytest_distcompat" not in entry.name and entry.suffix != ".pth" and not target.exists():
                target.symlink_to(entry)
    package = site / "pytest_distcompat"
    shutil.copytree(SOURCE, package, ignore=shutil.ignore_patterns("__pycache__"))
    for extension in extensions:
        shutil.rmtree(package / "ext" / extension)
        for face in FACES.get(extension, ()):
            (package / face).unlink()
    write_metadata(site, extensions)
    tests = directory / "tests"
    tests.mkdir()
    (tests / "test_marked.py").write_text(MARKED, encoding="utf-8")
    for name in ("my_trainer.py", "my_driver.py"):
        shutil.copy(EXAMPLE / name, tests)
    (tests / "test_mine.py").write_text(SUITE, encoding="utf-8")
    return Copy(directory / "venv" / "bin" / "python", tests)


def is_site(entry: str) -> bool:
    """Tell whether that entry of ``sys.path`` is a directory of installed packages."""
    return entry.endswith("site-packages") and Path(entry).is_dir()


def write_metadata(site: Path, without: list[str]) -> None:
    """Write the metadata of our distribution, with the entry points of the extensions that stay."""
    distribution = metadata.distribution("pytest-distcompat")
    directory = site / f"pytest_distcompat-{distribution.version}.dist-info"
    directory.mkdir()
    (directory / "METADATA").write_text(distribution.read_text("METADATA") or "", encoding="utf-8")
    lines = []
    removed = tuple(f"pytest_distcompat.ext.{extension}." for extension in without)
    for group in sorted(distribution.entry_points.groups):
        lines.append(f"[{group}]")
        for entry in distribution.entry_points.select(group=group):
            line = f"{entry.name} = {entry.value}"
            if not entry.value.startswith(removed):
                lines.append(line)
    (directory / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def with_dependents(name: str) -> list[str]:
    """Return an extension and those that need it, which go with it."""
    return [name, *(other for other, needed in NEEDS.items() if name in needed)]


def modules_of(name: str) -> list[Path]:
    """Return the modules of an extension."""
    return sorted((SOURCE / "ext" / name).rglob("*.py"))


def commands_of_extensions() -> dict[str, str]:
    """Return the extension that adds each command."""
    extension_by_command: dict[str, str] = {}
    for entry in metadata.entry_points(group="pytest_distcompat.commands"):
        commands = argparse.ArgumentParser().add_subparsers()
        entry.load()(commands)
        extension = entry.value.split(".")[2]
        extension_by_command.update(dict.fromkeys(commands.choices, extension))
    return extension_by_command


def test_the_core_imports_nothing_of_an_extension() -> None:
    faces = {SOURCE / name for names in FACES.values() for name in names}
    for path in SOURCE.rglob("*.py"):
        if path.is_relative_to(SOURCE / "ext") or path in faces:
            continue
        imported = {name for name in ours(imports_of(path, types=True)) if name.partition(".")[0] == "ext"}
        assert not imported, f"{path.relative_to(SOURCE)} imports {imported}"


def identifiers_of(path: Path) -> set[str]:
    """Every name, attribute, argument and whole text in a module; what docstrings and comments say is not among them."""
    identifiers: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        for field in ("id", "attr", "arg", "name", "value"):
            value = getattr(node, field, None)
            if isinstance(value, str):
                identifiers.add(value)
    return identifiers


def test_the_core_has_no_flag_of_an_extension() -> None:
    for path in SOURCE.rglob("*.py"):
        if not path.is_relative_to(SOURCE / "ext"):
            flags = identifiers_of(path) & FLAGS
            assert not flags, f"{path.relative_to(SOURCE)} has {flags}"


def test_the_core_has_no_word_of_a_simulation() -> None:
    """Its status is registered, and checks ask for abilities of a run (``trace.StandIn``)."""
    for path in SOURCE.rglob("*.py"):
        if not path.is_relative_to(SOURCE / "ext"):
            words = set(re.findall(r"\w+", path.read_text(encoding="utf-8").lower()))
            assert not words & {"simulated", "simulation", "simulations"}, path.relative_to(SOURCE)


def test_the_core_has_machines_as_plain_data_only() -> None:
    """How many there are (``spread.Spread``), in cells, marks and requests; what has runs there is a placement's."""
    of_data = {
        "spread.py",
        "cell/cell.py",
        "cell/matrix.py",
        "cell/options.py",
        "expect.py",
        "runner.py",
        "launch/request.py",
        "executors.py",
    }
    # The mark, the first placement and what says that it is not enough, and the name of a setting in reports.
    of_data |= {f"plugin/{name}" for name in ("marked/declare.py", "marked/run.py", "placement.py", "__init__.py")}
    of_data |= {"plugin/debugging.py", "engine.py", "report/compare.py"}
    for path in SOURCE.rglob("*.py"):
        name = str(path.relative_to(SOURCE))
        if name.startswith("ext/"):
            continue
        for line in path.read_text(encoding="utf-8").splitlines():
            if re.search(r"\b(nodes|per_node)\b", line):
                assert name in of_data, f"{name}: {line}"


@pytest.mark.parametrize("extension", EXTENSIONS)
def test_an_extension_imports_no_other_one(extension: str) -> None:
    for path in modules_of(extension):
        for name in ours(imports_of(path, types=True)):
            package, _, module = name.partition(".")
            other = package == "ext" and module.partition(".")[0] not in {"", extension, *NEEDS.get(extension, ())}
            assert not other, f"{path.relative_to(SOURCE)} imports {name}"


def test_extensions_import_public_modules_only() -> None:
    """Those that ``docs/extend.md`` names; ``PRIVATE_IMPORTS`` has what is left of others."""
    _, _, section = (ROOT / "docs" / "extend.md").read_text(encoding="utf-8").partition("## Public modules\n")
    rows = re.findall(r"^\| .* \| `([\w. ]+)` \|$", section, re.MULTILINE)
    public = {name for row in rows for name in row.split()}
    assert public
    for name in public:
        assert (SOURCE / name.replace(".", "/")).with_suffix(".py").exists() or (
            SOURCE / name.replace(".", "/")
        ).is_dir()
    all_names = {name_of(path).removesuffix(".__init__") for path in SOURCE.rglob("*.py")}
    for extension in EXTENSIONS:
        for path in modules_of(extension):
            for imported in ours(imports_of(path, types=True)) & all_names:
                is_own = imported == "ext" or imported.startswith("ext.")
                is_public = any(imported == name or imported.startswith(f"{name}.") for name in public)
                is_parent = any(name.startswith(f"{imported}.") for name in public)
                assert is_own or is_public or is_parent, f"{path.relative_to(SOURCE)} imports {imported}"


def test_names_that_users_import_are_those_of_the_extension() -> None:
    for name, driver in (
        ("accelerate", "AccelerateDriver"),
        ("deepspeed", "DeepSpeedDriver"),
        ("torch", "TorchDriver"),
        ("trainer", "TrainerDriver"),
    ):
        alias = importlib.import_module(f"pytest_distcompat.drivers.{name}")
        assert getattr(alias, driver) is DRIVERS.get(name)
        assert issubclass(getattr(alias, driver), TinyDriver)
    assert Source is DRIVERS.get("torch").sources[0].__class__  # type: ignore[attr-defined]  # only drivers of a sweep have it
    assert [suite for name, suite in vars(suites).items() if name.startswith("Test")] == [
        suite for name, suite in vars(collected).items() if name.startswith("Test")
    ]


def test_every_hook_is_on_the_page() -> None:
    page = (ROOT / "docs" / "extend.md").read_text(encoding="utf-8")
    hooks = [name for name in vars(hookspecs) if name.startswith("pytest_distcompat_")]
    assert re.findall(r"^\| `(pytest_distcompat_\w+)` \|", page, re.MULTILINE) == hooks


@pytest.mark.spawn
@pytest.mark.nightly
@pytest.mark.parametrize(
    "extensions",
    [
        pytest.param(EXTENSIONS, id="all"),
        *(pytest.param(with_dependents(name), id=name) for name in EXTENSIONS),
    ],
)
def test_without_extensions_the_rest_works(extensions: list[str], tmp_path: Path) -> None:
    copy = install_without(extensions, tmp_path)
    help_text = copy.run("--help").stdout
    flags = {option.flag for option in ALL_OPTIONS.values() if f"{option.flag}=" in help_text}
    assert flags == {option.flag for option in options_without(extensions).values()}
    command_help = copy.run_module("pytest_distcompat.cli", "--help").stdout
    for command, extension in commands_of_extensions().items():
        is_listed = re.search(rf"^    {command} ", command_help, re.MULTILINE) is not None
        assert is_listed == (extension not in extensions), command_help
    report = copy.directory / "report.json"
    done = copy.run(
        "-n",
        "2",
        "-k",
        "sum or fails or active or resume",
        f"--distcompat-report={report}",
        "--distcompat-gpus=0",
    )
    assert "1 failed, 3 passed" in done.stdout, done.stdout + done.stderr
    assert report.exists()
    again = copy.run("--lf", "-x", "--distcompat-gpus=0")
    assert "1 failed" in again.stdout
    assert "rank 1 failed" in again.stdout
