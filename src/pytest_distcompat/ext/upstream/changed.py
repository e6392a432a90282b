"""A change of a package, ``PACKAGE@FROM..TO``: where its old and new sources are, and an environment that has the new ones."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_distcompat.ext.upstream.side_by_side import file_name, install
from pytest_distcompat.failures import UsageProblem
from pytest_distcompat.installed import version_of

#: What ``--changed`` expects.
EXPECTED = "PACKAGE@FROM..TO (releases, wheels or directories; FROM may be `installed`), or PACKAGE@FILE.diff"
#: How the installed copy is called.
INSTALLED = "installed"
#: The plugin that runs the cells of a file, and its option.
SELECTING_PLUGIN, SELECTION = "pytest_distcompat.ext.upstream.selected", "--distcompat-selection"
#: The endings of files with a unified diff.
_DIFFS = (".diff", ".patch")


@dataclass(frozen=True)
class Change:
    """A change of a package.

    Attributes:
        name: The name of its run, and of the files of the run.
        text: The change as ``distcompat reach --changed`` reads it.
        target: The directory that Python has to import from first.
    """

    name: str
    text: str
    target: Path


def read_change(text: str, directory: Path) -> Change:
    """Return the change that a text names; what has to be installed or patched for it goes into the directory.

    Raises:
        UsageProblem: The text is not right, pip cannot install a release, or the diff does not fit the installed package.
    """
    package, _, where = text.partition("@")
    if not package or not where:
        raise UsageProblem(f"{text!r} is no change of a package; expected: {EXPECTED}")
    name = f"{package}@{Path(where).name}"
    if where.endswith(_DIFFS):
        diff = Path(where).resolve()
        return Change(
            name, f"{package}@{diff}", _patched(package, diff, directory / file_name(name))
        )
    # A path may begin or end with two dots of its own.
    match = re.fullmatch(r"(?P<old>.*[^./])/?\.\.(?P<new>/?[^./].*|\.\.?/.*)", where)
    if match is None:
        raise UsageProblem(f"{text!r} is no change of a package; expected: {EXPECTED}")
    old = _site(package, match["old"], directory)
    new = _site(package, match["new"], directory)
    return Change(f"{package}@{Path(match['new']).name}", f"{package}@{old}..{new}", new)


def select_cells(
    change: Change,
    maps: Sequence[Path],
    selection: Path,
    *,
    cell: str | None = None,
    cells_per_place: str | None = None,
) -> bool:
    """Write the cells that execute what changes to a file, print what no cell executes, and tell whether there are any.

    Args:
        change: The change.
        maps: The maps of the old release.
        selection: The file.
        cell: A pattern of the cells of the maps that count; None for all.
        cells_per_place: How many cells are to execute each place; None for all.
    """
    arguments = ["reach", *map(str, maps), "--changed", change.text, "--select", str(selection)]
    if cell:
        arguments += ["--cell", cell]
    if cells_per_place:
        arguments += ["--cells-per-place", cells_per_place]
    # By its command: an extension imports no other one, and maps may be one.
    command = [sys.executable, "-m", "pytest_distcompat.cli", *arguments]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode:
        # The command names itself.
        raise UsageProblem(process.stderr.strip().removeprefix("distcompat: "))
    print(process.stdout, end="", flush=True)
    lines = selection.read_text(encoding="utf-8").splitlines()
    return any(not line.startswith(("#", "*", "-")) for line in lines)


def _site(package: str, text: str, directory: Path) -> Path:
    """Return the directory that has the package's: that of a release, of a wheel, or one that is there."""
    path = Path(text)
    if path.is_dir():
        # It may be the package's own.
        site = path.parent if (path / "__init__.py").is_file() else path
        return site.resolve()
    if path.suffix == ".whl":
        if not path.is_file():
            raise UsageProblem(f"{path}: there is no such wheel")
        return install(f"{package} @ {path.resolve().as_uri()}", directory)
    if text in {INSTALLED, version_of(package)}:
        return _installed(package)
    if "/" in text:
        raise UsageProblem(f"{path}: there is no such directory")
    return install(f"{package}=={text}", directory)


def _installed(package: str) -> Path:
    """Return the directory from which Python imports the package. Raises UsageProblem if it is not installed."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise UsageProblem(f"{package} is not installed")
    return Path(spec.submodule_search_locations[0]).resolve().parent


def _patched(package: str, diff: Path, target: Path) -> Path:
    """Return a directory with a copy of the installed package to which the diff is applied."""
    try:
        text = diff.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageProblem(f"{diff}: {error.strerror}") from None
    site = _installed(package)
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(site / package, target / package, ignore=shutil.ignore_patterns("__pycache__"))
    # Its version is read from there.
    for metadata in site.glob(f"{package}-*.dist-info"):
        shutil.copytree(metadata, target / metadata.name)
    own = "".join(_sections_of(package, text))
    if not own:
        raise UsageProblem(f"{diff}: it changes no file of {package}")
    command = [_git(), "-C", str(target), "apply", "--whitespace=nowarn", "-"]
    # In a repository around the directory git would leave out all files.
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(target.parent)}
    process = subprocess.run(
        command, input=own, env=environment, capture_output=True, text=True, check=False
    )
    if process.returncode:
        problem = " ".join(process.stderr.split())
        raise UsageProblem(f"{diff}: it does not fit the installed {package}: {problem}")
    return target


def _git() -> str:
    git = shutil.which("git")
    if git is None:
        raise UsageProblem("git is needed to apply a diff")
    return git


def _sections_of(package: str, diff: str) -> list[str]:
    """Return the parts of a diff that are about files of the package, with paths that begin with its name."""
    sections: list[str] = []
    lines = diff.splitlines(keepends=True)
    keep = False
    for number, line in enumerate(lines):
        if (
            line.startswith("--- ")
            and number + 1 < len(lines)
            and lines[number + 1].startswith("+++ ")
        ):
            old = _below(package, line)
            new = _below(package, lines[number + 1])
            keep = bool(old or new)
            if keep:
                sections += [f"--- {_patch_path(old)}\n", f"+++ {_patch_path(new)}\n"]
        elif line.startswith("diff --git "):
            keep = False
        elif (
            keep
            and line.startswith(("@@ ", " ", "+", "-", "\\", "\n"))
            and not _is_name_line(lines, number)
        ):
            sections.append(line)
    return sections


def _is_name_line(lines: list[str], number: int) -> bool:
    """Tell whether a line is the second of the two that name a file."""
    return lines[number].startswith("+++ ") and number > 0 and lines[number - 1].startswith("--- ")


def _below(package: str, line: str) -> str:
    """Return the path below the package's directory in a line that names a file; empty for a file of none."""
    path = line[4:].partition("\t")[0].strip()
    _, separator, below = f"/{path}".partition(f"/{package}/")
    return f"{package}/{below}" if separator else ""


def _patch_path(path: str) -> str:
    return f"x/{path}" if path else "/dev/null"
