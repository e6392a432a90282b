"""The places in which a library changes: read from two copies of its package, or from a diff.

``distcompat reach MAP --changed accelerate@OLD_DIR..NEW_DIR`` and ``distcompat releases --changed``
call ``read_change`` with the text of the option. The result is a ``ChangedPlace`` for each group of
lines that are replaced, removed or added together. ``changed`` then looks up in a *map* (``MAP``)
which test cells executed the old lines; it has the lines of the old release that each executed.

Only files with training code count (``libraries``). Comments and docstrings do not count. A
``FileId`` is the file of a library, ``FileId("accelerate", "utils/other.py")``.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pytest_distcompat.ext.reach.libraries import BY_NAME, FileId, Library
from pytest_distcompat.failures import UsageProblem
from pytest_distcompat.installed import version_of

#: The head of a hunk, a group of lines of a diff: ``@@ -12,3 +14,0 @@``. The first line and the
#: number of lines in the old file, then those in the new one; without a number it is one line.
_HEAD = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
#: How a line begins that defines something.
_DEFINITION = re.compile(r"\s*(?:@|def |async def |class )")


@dataclass(frozen=True)
class ChangedPlace:
    """Lines of a file that are replaced, removed or added together.

    Attributes:
        file: Library and path: ``accelerate/accelerator.py``.
        line: The line of the new file at which it begins.
        removed: The numbers of the old lines that are gone or replaced: ``(12, 13)``.
        after: The number of the old line that the new ones come after; 0 at the start. If no line
            is removed, the cells that execute this one or the next count as those of the place.
        text: The first new line, or the first removed one where none is new.
        defines: Whether lines are only added, and the first of them begins a function or class. Who
            will execute that no old line says.
    """

    file: FileId
    line: int
    removed: tuple[int, ...]
    after: int
    text: str
    defines: bool


def read_change(text: str) -> tuple[str, list[ChangedPlace]]:
    """Return the name of the library that a change is of, and the changed places.

    Args:
        text: ``PACKAGE@OLD_DIR..NEW_DIR`` or ``PACKAGE@FILE.diff``. A directory is that of the
            package, or one that has it, such as site-packages.

    Raises:
        UsageProblem: The text or what it names is not right.
    """
    package, _, where = text.partition("@")
    library = BY_NAME.get(package)
    if library is None or not where:
        known = ", ".join(BY_NAME)
        raise UsageProblem(
            f"{text!r} is not right: "
            f"expected PACKAGE@OLD_DIR..NEW_DIR or PACKAGE@FILE.diff, of {known}."
        )
    if where.endswith((".diff", ".patch")):
        diff = _read(Path(where))
        return package, list(places_of_diff(library, diff))
    old, separator, new = where.partition("..")
    if not separator:
        raise UsageProblem(
            f"{where!r} is not right: "
            "expected two directories as OLD_DIR..NEW_DIR, or a .diff file."
        )
    before = _package_directory(old, package)
    after = _package_directory(new, package)
    return package, list(changed_places(library, before, after))


def files_outside(text: str) -> list[str]:
    """Return the changed files of a package that no map has, since they are no training code.

    ``command`` prints how many they are, so that the user knows of them: models of transformers,
    say. The result is ``["models/llama/modeling_llama.py"]``.

    Args:
        text: The change, as in ``read_change``. Of a diff the result is empty.
    """
    package, _, where = text.partition("@")
    old, separator, new = where.partition("..")
    if not separator:
        return []
    before = _package_directory(old, package)
    after = _package_directory(new, package)
    #: All Python files of either copy, and those of its training code.
    names: set[str] = set()
    covered: set[str] = set()
    for directory in (before, after):
        names |= _relative_names(directory.rglob("*.py"), directory)
        covered |= _relative_names(BY_NAME[package].files(directory), directory)
    changed: list[str] = []
    for name in sorted(names - covered):
        if _bytes(before / name) != _bytes(after / name):
            changed.append(name)
    return changed


def _relative_names(paths: Iterable[Path], directory: Path) -> set[str]:
    """Return the names of files, relative to the directory of their package."""
    return {path.relative_to(directory).as_posix() for path in paths}


def _bytes(path: Path) -> bytes:
    """Return the content of a file, empty if there is no such file."""
    if not path.is_file():
        return b""
    return path.read_bytes()


def old_release(text: str) -> str | None:
    """Return the release of the old copy in a change, such as ``1.14.0``.

    ``command`` compares it with the release that the map is of. None if the metadata of the package
    is not beside it, as in a clone, and of a diff.
    """
    package, _, where = text.partition("@")
    old, separator, _ = where.partition("..")
    if not separator:
        return None
    return version_of(package, [old, str(Path(old).parent)])


def _read(path: Path) -> str:
    """Return the text of a file. Raises UsageProblem if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UsageProblem(f"{path}: {error.strerror}") from None


def _package_directory(text: str, package: str) -> Path:
    """Return the package's directory: the given one, or the one of its name in it.

    Raises:
        UsageProblem: Neither is a package.
    """
    directory = Path(text)
    package_directory = directory
    if (directory / package).is_dir():
        package_directory = directory / package
    if not (package_directory / "__init__.py").is_file():
        raise UsageProblem(f"{directory}: no package {package} is there")
    return package_directory


def changed_places(library: Library, old: Path, new: Path) -> Iterator[ChangedPlace]:
    """Yield the places in which two copies of a library's training code differ.

    Comments and docstrings do not count.

    Args:
        library: The library.
        old: The directory of the old copy of its package.
        new: The directory of the new one.
    """
    old_files = _relative_names(library.files(old), old)
    new_files = _relative_names(library.files(new), new)
    for name in sorted(old_files | new_files):
        before: list[str] = []
        after: list[str] = []
        if name in old_files:
            before = _code_lines(_read(old / name))
        if name in new_files:
            after = _code_lines(_read(new / name))
        if before == after:
            continue
        # The first two lines of a diff are the names of the files. ``n=0``: no unchanged lines.
        _, _, *hunks = difflib.unified_diff(before, after, n=0, lineterm="")
        yield from _places(FileId(library.name, name), hunks)


def _code_lines(source: str) -> list[str]:
    """Return the lines of a file, those of docstrings and comments empty.

    The number of lines stays, so that a difference has the number of its line in the file.
    """
    lines = source.splitlines()
    try:
        module = ast.parse(source)
    except SyntaxError:
        # A file for another Python version, say: its lines are compared as they are.
        return lines
    for node in ast.walk(module):
        docstring = _docstring_of(node)
        if docstring is not None and docstring.end_lineno:
            for number in range(docstring.lineno, docstring.end_lineno + 1):
                lines[number - 1] = ""
    for index, line in enumerate(lines):
        if line.lstrip().startswith("#"):
            lines[index] = ""
    return lines


def _docstring_of(node: ast.AST) -> ast.Expr | None:
    """Return the statement that is the docstring of a module, class or function."""
    if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        return None
    if not node.body:
        return None
    first = node.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        return first
    return None


def places_of_diff(library: Library, diff: str) -> Iterator[ChangedPlace]:
    """Yield the changed places of a unified diff.

    Args:
        library: The library.
        diff: The text. Its paths have the name of the package in them, as git writes them.
    """
    #: The file that the lines of the diff are about; None for one that is not of the package.
    file: FileId | None = None
    lines: list[str] = []
    old_name = ""
    # The line that would begin a further file at the end, so that the last one is yielded too.
    for line in [*diff.splitlines(), "--- /dev/null"]:
        if line.startswith("--- "):
            if file is not None:
                yield from _places(file, lines)
            file = None
            lines = []
            old_name = line.removeprefix("--- ")
        elif line.startswith("+++ "):
            name = line.removeprefix("+++ ")
            if name.startswith("/dev/null"):
                # The new release does not have the file.
                name = old_name
            file = _file_in(library, name)
        elif not line.startswith("diff --git "):
            lines.append(line)


def _file_in(library: Library, name: str) -> FileId | None:
    """Return the file that a path of a diff names; None if it is not of the package."""
    # git and diff write what they know of a file after a tab.
    path, _, _ = name.partition("\t")
    rooted_path = f"/{path.strip()}"
    _, separator, below = rooted_path.partition(f"/{library.name}/")
    if not separator or not below.endswith(".py"):
        return None
    return FileId(library.name, below)


def _places(file: FileId, diff: Iterable[str]) -> Iterator[ChangedPlace]:
    """Yield the changed places of a file from the hunks of a unified diff.

    The hunks may show unchanged lines around the places, which begin with a space.
    """
    block = _Block(file)
    for line in diff:
        head = _HEAD.match(line)
        if head:
            yield from block.place()
            old_first = _first_line(head[1], head[2])
            new_first = _first_line(head[3], head[4])
            block.begin(old_first, new_first)
        elif line.startswith("-"):
            block.remove(line[1:])
        elif line.startswith("+"):
            block.add(line[1:])
        elif line.startswith(" ") or not line:
            # An unchanged line ends a place. It is one line further in both files.
            yield from block.place()
            block.begin(block.old + 1, block.new + 1)
    yield from block.place()


def _first_line(number: str, count: str | None) -> int:
    """Return the number of a hunk's first line, in the old or the new file.

    Args:
        number: The number in the head of the hunk.
        count: How many lines the hunk has, as the head says it; None for one.
    """
    if count == "0":
        # A hunk without lines names the line that it comes after.
        return int(number) + 1
    return int(number)


class _Block:
    """The changed lines that follow each other in a diff; they become a place if they have code.

    ``_places`` calls ``begin`` after a head of a hunk or an unchanged line, ``remove`` and ``add``
    for each changed line, and ``place`` at their end.

    Attributes:
        old: The number of the next line of the old file.
        new: The number of the next line of the new file.
    """

    def __init__(self, file: FileId) -> None:
        self._file = file
        self.begin(1, 1)

    def begin(self, old: int, new: int) -> None:
        """Begin anew, at these lines of the old and of the new file."""
        self.old = old
        self.new = new
        self._old_first = old
        self._new_first = new
        self._removed: dict[int, str] = {}
        self._added: list[str] = []

    def remove(self, text: str) -> None:
        """Take a line that only the old file has."""
        if _is_code(text):
            self._removed[self.old] = text
        self.old += 1

    def add(self, text: str) -> None:
        """Take a line that only the new file has."""
        if _is_code(text):
            if not self._added:
                # The place begins at its first line of code.
                self._new_first = self.new
            self._added.append(text)
        self.new += 1

    def place(self) -> Iterator[ChangedPlace]:
        """Yield the place, if the lines have code."""
        if not self._removed and not self._added:
            return
        lines = [*self._added, *self._removed.values()]
        text = lines[0]
        defines = not self._removed and bool(_DEFINITION.match(text))
        yield ChangedPlace(
            file=self._file,
            line=self._new_first,
            removed=tuple(self._removed),
            after=self._old_first - 1,
            text=text.strip(),
            defines=defines,
        )


def _is_code(text: str) -> bool:
    """Tell whether a line is neither empty nor a comment."""
    code = text.strip()
    return bool(code) and not code.startswith("#")
