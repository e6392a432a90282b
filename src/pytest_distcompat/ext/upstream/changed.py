"""A change of a package, ``PACKAGE@FROM..TO``: its sources, and the cells to run for it.

``distcompat releases --changed accelerate@1.12.0..1.13.0 --reach FILE`` (``releases.py``) tests a
new release with only those cells that execute what it changes. A cell is one configuration under
test, such as ``fsdp2-fp32-w2``: strategy, precision, number of ranks. It calls this module twice:

1. ``read_change`` reads the value of ``--changed``. It makes the new sources importable in one
   directory, by installing a release or by patching a copy of the installed package, and returns
   a ``Change``.
2. ``select_cells`` has the command ``distcompat reach`` compare both sources with a map (FILE) of
   which lines each cell executes. It writes the cells to run into a file.

``releases`` then runs pytest with that directory first on ``sys.path``, and with the plugin of
``selected.py``, which runs the cells of the file.
"""

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

#: The values that ``--changed`` accepts, for messages.
EXPECTED = (
    "PACKAGE@FROM..TO (releases, wheels or directories; FROM may be `installed`), "
    "or PACKAGE@FILE.diff"
)
#: The word for the installed copy, in place of a release.
INSTALLED = "installed"
#: The plugin that runs the cells that a file lists (``pytest -p``), and the option for the file.
SELECTING_PLUGIN, SELECTION = "pytest_distcompat.ext.upstream.selected", "--distcompat-selection"
#: The endings of files with a unified diff.
_DIFFS = (".diff", ".patch")
#: How the lines below the names of a file begin in a unified diff. "\" begins
#: "\ No newline at end of file".
_CONTENT_LINES = ("@@ ", " ", "+", "-", "\\", "\n")


@dataclass(frozen=True)
class Change:
    """A change of a package.

    Attributes:
        name: The name of the run with the change, and of the files of the run:
            ``accelerate@1.13.0``.
        text: The change as ``distcompat reach --changed`` reads it: with directories in place of
            releases, ``accelerate@/old/site../new/site``, or with the absolute path of a diff.
        target: The directory with the changed package, which must come first on ``sys.path``.
    """

    name: str
    text: str
    target: Path


def read_change(text: str, directory: Path) -> Change:
    """Return the change that a value of ``--changed`` names.

    Args:
        text: The value, see ``EXPECTED``: ``accelerate@1.12.0..1.13.0``,
            ``accelerate@installed..../accelerate/src`` or ``accelerate@fix.diff``.
        directory: Where to install releases, and to patch a copy of the installed package.

    Raises:
        UsageProblem: If the text is invalid, pip cannot install a release, or the diff does not
            apply to the installed package.
    """
    package, _, where = text.partition("@")
    if not package or not where:
        raise UsageProblem(f"{text!r} is no change of a package; expected: {EXPECTED}")
    name = f"{package}@{Path(where).name}"
    if where.endswith(_DIFFS):
        diff = Path(where).resolve()
        target = _patched(package, diff, directory / file_name(name))
        return Change(name, f"{package}@{diff}", target)
    # The two dots between FROM and TO are not those of a path: in ``1.0..../src`` TO is ``../src``,
    # and FROM must not end with a dot or a slash.
    match = re.fullmatch(r"(?P<old>.*[^./])/?\.\.(?P<new>/?[^./].*|\.\.?/.*)", where)
    if match is None:
        raise UsageProblem(f"{text!r} is no change of a package; expected: {EXPECTED}")
    old_site = _site(package, match["old"], directory)
    new_site = _site(package, match["new"], directory)
    name = f"{package}@{Path(match['new']).name}"
    return Change(name, f"{package}@{old_site}..{new_site}", new_site)


def select_cells(
    change: Change,
    maps: Sequence[Path],
    selection: Path,
    *,
    cell: str | None = None,
    cells_per_place: str | None = None,
) -> bool:
    """Write a file of the cells that execute changed code.

    A line of the file is ``accelerate/fsdp2-fp32-w2: save, load``; ``selected.py`` says what it
    means. The changed code that no cell executes is printed.

    Args:
        change: The change.
        maps: Files of ``pytest --distcompat-reach``: which code of the old release each cell
            executes.
        selection: The file to write.
        cell: A pattern for the cells to choose from, ``accelerate/*``; None for all.
        cells_per_place: How many cells to choose for each changed place, as text; None for all.

    Returns:
        Whether any cell was selected.
    """
    arguments = ["reach", *[str(path) for path in maps]]
    arguments += ["--changed", change.text]
    arguments += ["--select", str(selection)]
    if cell:
        arguments += ["--cell", cell]
    if cells_per_place:
        arguments += ["--cells-per-place", cells_per_place]
    # As a command, because an extension must not import another one.
    command = [sys.executable, "-m", "pytest_distcompat.cli", *arguments]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode:
        # The command's messages begin with its name, and so will this one.
        raise UsageProblem(process.stderr.strip().removeprefix("distcompat: "))
    print(process.stdout, end="", flush=True)
    lines = selection.read_text(encoding="utf-8").splitlines()
    # Those are a comment, the cells that the map does not know, and the cells left out.
    return any(not line.startswith(("#", "*", "-")) for line in lines)


def _site(package: str, text: str, directory: Path) -> Path:
    """Return the directory from which Python can import a version of the package.

    Args:
        package: The name of the package.
        text: A directory, a wheel, a release (``1.13.0``), or ``INSTALLED``.
        directory: Where to install a wheel or a release.
    """
    path = Path(text)
    if path.is_dir():
        # The directory may be the package itself; Python imports it from the one around it.
        site = path.parent if (path / "__init__.py").is_file() else path
        return site.resolve()
    if path.suffix == ".whl":
        if not path.is_file():
            raise UsageProblem(f"{path}: there is no such wheel")
        return install(f"{package} @ {path.resolve().as_uri()}", directory)
    # The installed release is not installed a second time.
    if text in {INSTALLED, version_of(package)}:
        return _installed(package)
    if "/" in text:
        raise UsageProblem(f"{path}: there is no such directory")
    return install(f"{package}=={text}", directory)


def _installed(package: str) -> Path:
    """Return the directory from which Python imports the package. May raise UsageProblem."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise UsageProblem(f"{package} is not installed")
    return Path(spec.submodule_search_locations[0]).resolve().parent


def _patched(package: str, diff: Path, target: Path) -> Path:
    """Copy the installed package into ``target``, apply the diff to it, and return ``target``."""
    try:
        text = diff.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageProblem(f"{diff}: {error.strerror}") from None
    site = _installed(package)
    shutil.rmtree(target, ignore_errors=True)
    without_caches = shutil.ignore_patterns("__pycache__")
    shutil.copytree(site / package, target / package, ignore=without_caches)
    # ``importlib.metadata`` reads the version from this directory: without it a library would
    # seem not to be installed.
    for metadata in site.glob(f"{package}-*.dist-info"):
        shutil.copytree(metadata, target / metadata.name)
    package_diff = "".join(_diff_lines_of(package, text))
    if not package_diff:
        raise UsageProblem(f"{diff}: it changes no file of {package}")
    command = [_git(), "-C", str(target), "apply", "--whitespace=nowarn", "-"]
    # If the directory is inside a repository, ``git apply`` would skip its files.
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(target.parent)}
    process = subprocess.run(
        command, input=package_diff, env=environment, capture_output=True, text=True, check=False
    )
    if process.returncode:
        problem = " ".join(process.stderr.split())
        raise UsageProblem(f"{diff}: it does not fit the installed {package}: {problem}")
    return target


def _git() -> str:
    """Return the path of git. Raises UsageProblem without it."""
    git = shutil.which("git")
    if git is None:
        raise UsageProblem("git is needed to apply a diff")
    return git


def _diff_lines_of(package: str, diff: str) -> list[str]:
    """Return the lines of a unified diff that change files of the package.

    The paths of the returned lines begin with the name of the package: those of
    ``a/src/accelerate/utils.py`` become ``x/accelerate/utils.py``. A diff of a whole repository may
    have files of tests and docs too; their lines are left out.
    """
    kept: list[str] = []
    lines = diff.splitlines(keepends=True)
    following_lines = [*lines[1:], ""]
    in_package = False
    previous = ""
    for line, following in zip(lines, following_lines, strict=True):
        is_old_name = line.startswith("--- ") and following.startswith("+++ ")
        is_new_name = line.startswith("+++ ") and previous.startswith("--- ")
        if is_old_name:
            # A file begins: its two lines of names are written anew, both at once.
            old = _path_in_package(package, line)
            new = _path_in_package(package, following)
            in_package = bool(old or new)
            if in_package:
                kept.append(f"--- {_patch_path(old)}\n")
                kept.append(f"+++ {_patch_path(new)}\n")
        elif line.startswith("diff --git "):
            # What git says of a file before its names (modes, hashes) is not needed.
            in_package = False
        elif in_package and not is_new_name and line.startswith(_CONTENT_LINES):
            kept.append(line)
        previous = line
    return kept


def _path_in_package(package: str, line: str) -> str:
    """Return the path of a line that names a file, from the package's directory on.

    ``--- a/src/accelerate/utils.py`` gives ``accelerate/utils.py`` for the package ``accelerate``.
    It is empty if the file is not in the package, or does not exist (``/dev/null``).
    """
    # Behind ``--- `` or ``+++ ``; ``diff -u`` writes a tab and the time behind the name.
    name, _, _ = line[4:].partition("\t")
    path = "/" + name.strip()
    _, separator, below = path.partition(f"/{package}/")
    if not separator:
        return ""
    return f"{package}/{below}"


def _patch_path(path: str) -> str:
    """Return a path as ``git apply`` expects it: with a directory in front, which it strips."""
    if not path:
        return "/dev/null"
    return f"x/{path}"
