"""A change of a library: which cells execute the changed places, and which no cell executes."""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pytest_distcompat.ext.reach.libraries import BY_NAME, FileId, Library
from pytest_distcompat.ext.reach.map import Context, FileReach, ReachMap
from pytest_distcompat.failures import UsageProblem
from pytest_distcompat.installed import version_of

#: The head of a hunk: its first line and number of lines, in the old file and in the new one.
_HEAD = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
#: How a line begins that defines something.
_DEFINITION = re.compile(r"\s*(?:@|def |async def |class )")


@dataclass(frozen=True)
class ChangedPlace:
    """Lines of a file that are replaced, removed or added together.

    Attributes:
        line: The line of the new file at which it begins.
        removed: The numbers of the old lines that are gone or replaced.
        after: The old line that the new ones come after; 0 at the start.
        text: The first new line, or the first removed one where none is new.
        defines: Whether the first new line defines a function or class, so that no old line says
            who executes it.
    """

    file: FileId
    line: int
    removed: tuple[int, ...]
    after: int
    text: str
    defines: bool


@dataclass(frozen=True)
class PlaceReach:
    """A changed place, the function of the old release that it is in, and who executes it.

    Attributes:
        place: The place.
        function: The name of the function; empty outside all functions.
        contexts: Who executes any of its old statements.
        ways: Who executes the same of its old statements and branches: a replaced block with a
            condition has a way for each outcome.
    """

    place: ChangedPlace
    function: str
    contexts: tuple[Context, ...]
    ways: tuple[tuple[Context, ...], ...]

    @property
    def on_import(self) -> bool:
        """Whether it is outside all functions, where fork servers run it and no rank."""
        return not self.function and not self.place.defines

    @property
    def cells(self) -> list[str]:
        """Return the cells that execute it."""
        return list(dict.fromkeys(context.place for context in self.contexts))


@dataclass(frozen=True)
class CellReach:
    """A cell that executes changed places.

    Attributes:
        places: How many it executes.
        alone: How many of them no other cell executes.
        weight: The sum over its places of one divided by the number of cells that execute the
            place.
    """

    cell: str
    places: int
    alone: int
    weight: float


def read_change(text: str) -> tuple[str, list[ChangedPlace]]:
    """Return the library that a change is of, and the changed places.

    Args:
        text: ``PACKAGE@OLD_DIR..NEW_DIR`` or ``PACKAGE@FILE.diff``.

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
        return package, list(places_of_diff(library, _read(Path(where))))
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

    Args:
        text: The change, as in ``read_change``. Of a diff the result is empty.
    """
    package, _, where = text.partition("@")
    old, separator, new = where.partition("..")
    if not separator:
        return []
    before = _package_directory(old, package)
    after = _package_directory(new, package)
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
    """Return the release of the old copy in a change, if its metadata is beside it."""
    package, _, where = text.partition("@")
    old, separator, _ = where.partition("..")
    if not separator:
        return None
    return version_of(package, [old, str(Path(old).parent)])


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UsageProblem(f"{path}: {error.strerror}") from None


def _package_directory(text: str, package: str) -> Path:
    """Return the package's directory: this one, or that of its name in it (site-packages)."""
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
        # The first two lines of a diff are the names of the files.
        _, _, *hunks = difflib.unified_diff(before, after, n=0, lineterm="")
        yield from _places(FileId(library.name, name), hunks)


def _code_lines(source: str) -> list[str]:
    """Return the lines of a file, those of docstrings and comments empty."""
    lines = source.splitlines()
    try:
        module = ast.parse(source)
    except SyntaxError:
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
    file: FileId | None = None
    lines: list[str] = []
    old_name = ""
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

    The hunks may show unchanged lines around the places.
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
            yield from block.place()
            block.begin(block.old + 1, block.new + 1)
    yield from block.place()


def _first_line(number: str, count: str | None) -> int:
    """Return the number of a hunk's first line.

    Args:
        number: The number in the head of the hunk.
        count: How many lines the hunk has; None for one.
    """
    if count == "0":
        # A hunk without lines names the line that it comes after.
        return int(number) + 1
    return int(number)


class _Block:
    """The changed lines that follow each other in a diff.

    Attributes:
        old: The number of the next line of the old file.
        new: The number of the next line of the new file.
    """

    def __init__(self, file: FileId) -> None:
        self._file = file
        self.begin(1, 1)

    def begin(self, old: int, new: int) -> None:
        """Begin anew, at these lines."""
        self.old = old
        self.new = new
        self._old_first = old
        self._new_first = new
        self._removed: dict[int, str] = {}
        self._added: list[str] = []

    def remove(self, text: str) -> None:
        """Take an old line."""
        if _is_code(text):
            self._removed[self.old] = text
        self.old += 1

    def add(self, text: str) -> None:
        """Take a new line."""
        if _is_code(text):
            if not self._added:
                self._new_first = self.new
            self._added.append(text)
        self.new += 1

    def place(self) -> Iterator[ChangedPlace]:
        """Yield the place, if the lines have code."""
        if not self._removed and not self._added:
            return
        text, *_ = (*self._added, *self._removed.values())
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
    code = text.strip()
    return bool(code) and not code.startswith("#")


def reached_places(reach_map: ReachMap, places: Iterable[ChangedPlace]) -> list[PlaceReach]:
    """Return for each place who executes it.

    Args:
        reach_map: The map of the old release.
        places: The changed places.
    """
    reached = []
    for place in places:
        if place.file not in reach_map.files or place.defines:
            reached.append(PlaceReach(place, "", (), ()))
        else:
            file_reach = reach_map.coverage_of(place.file)
            reached.append(_reached_place(file_reach, place))
    return reached


def _reached_place(file_reach: FileReach, place: ChangedPlace) -> PlaceReach:
    """Return who executes the old statements of a place, and its ways.

    Where lines are only added, the statements before and after them count.
    """
    file = file_reach.file
    function_name = ""
    # The lines of each statement, as bits.
    statements: dict[int, None] = {}
    # The one before may be in another branch than the new lines, and so may the one after.
    for line in place.removed or (place.after, place.after + 1):
        # A place outside all functions runs on import.
        function = file.function_at(line) or file.function_at(line + 1)
        if function is None:
            continue
        function_name = function_name or function.name
        statement = 1 << file.statement_at(line)
        if statement & function.body:
            statements[statement] = None
        else:
            # A changed signature, or the first lines of a body: all that execute the function.
            statements[function.body] = None
    bits = 0
    ways: dict[tuple[Context, ...], None] = {}
    for statement in statements:
        bits |= statement
        ways[file_reach.contexts_of_lines(statement)] = None
    for contexts in _contexts_of_branches(file_reach, place):
        ways[contexts] = None
    ways.pop((), None)
    return PlaceReach(place, function_name, file_reach.contexts_of_lines(bits), tuple(ways))


def _contexts_of_branches(
    file_reach: FileReach, place: ChangedPlace
) -> Iterator[tuple[Context, ...]]:
    """Yield who executes each branch from an old line of a place."""
    removed = set(place.removed)
    for number, branch in enumerate(file_reach.file.branches):
        if branch.line in removed:
            yield file_reach.contexts_of_branches(1 << number)


def cells_by_specificity(reached: Iterable[PlaceReach]) -> list[CellReach]:
    """Return the cells that execute changed places, first those whose places few others execute."""
    # For each place of a cell, how many cells execute it.
    cell_counts: dict[str, list[int]] = {}
    for place_reach in reached:
        cells = place_reach.cells
        for cell in cells:
            cell_counts.setdefault(cell, []).append(len(cells))
    cell_reaches = []
    for cell, counts in cell_counts.items():
        weight = 0.0
        for count in counts:
            weight += 1 / count
        cell_reach = CellReach(
            cell=cell,
            places=len(counts),
            alone=counts.count(1),
            weight=weight,
        )
        cell_reaches.append(cell_reach)
    return sorted(cell_reaches, key=lambda cell_reach: (-cell_reach.weight, cell_reach.cell))
