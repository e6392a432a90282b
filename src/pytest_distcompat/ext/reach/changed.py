"""A change of a library: which cells execute the changed places, and which places no cell executes."""

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
    """A changed place, the function of the old release that it is in, and who executes it."""

    place: ChangedPlace
    function: str
    contexts: tuple[Context, ...]

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
    """Return the library and the changed places of ``PACKAGE@OLD_DIR..NEW_DIR``, or of ``PACKAGE@FILE.diff``.

    Raises:
        UsageProblem: The text or what it names is not right.
    """
    package, _, where = text.partition("@")
    library = BY_NAME.get(package)
    if library is None or not where:
        known = ", ".join(BY_NAME)
        raise UsageProblem(
            f"{text!r} is not right: expected PACKAGE@OLD_DIR..NEW_DIR or PACKAGE@FILE.diff, of {known}."
        )
    if where.endswith((".diff", ".patch")):
        return package, list(places_of_diff(library, _read(Path(where))))
    old, separator, new = where.partition("..")
    if not separator:
        raise UsageProblem(
            f"{where!r} is not right: expected two directories as OLD_DIR..NEW_DIR, or a .diff file."
        )
    return package, list(
        changed_places(library, _package_directory(old, package), _package_directory(new, package))
    )


def files_outside(text: str) -> list[str]:
    """Return the changed files of a package that no map has, since they are no training code; of a diff none are known."""
    package, _, where = text.partition("@")
    old, separator, new = where.partition("..")
    if not separator:
        return []
    names: set[str] = set()
    covered: set[str] = set()
    directories = [_package_directory(old, package), _package_directory(new, package)]
    for directory in directories:
        names.update(path.relative_to(directory).as_posix() for path in directory.rglob("*.py"))
        covered.update(
            path.relative_to(directory).as_posix() for path in BY_NAME[package].files(directory)
        )
    before, after = directories
    return [
        name for name in sorted(names - covered) if _bytes(before / name) != _bytes(after / name)
    ]


def _bytes(path: Path) -> bytes:
    """Return the content of a file; nothing of one that is not there."""
    return path.read_bytes() if path.is_file() else b""


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
    """Return the package's directory: this one, or the one of its name in it, as in site-packages."""
    directory = Path(text)
    inner = directory / package
    found = inner if inner.is_dir() else directory
    if not (found / "__init__.py").is_file():
        raise UsageProblem(f"{directory}: no package {package} is there")
    return found


def changed_places(library: Library, old: Path, new: Path) -> Iterator[ChangedPlace]:
    """Yield the places in which two copies of a library's training code differ, but for comments and docstrings."""
    old_files = {path.relative_to(old).as_posix() for path in library.files(old)}
    new_files = {path.relative_to(new).as_posix() for path in library.files(new)}
    for name in sorted(old_files | new_files):
        before = _code_lines(_read(old / name)) if name in old_files else []
        after = _code_lines(_read(new / name)) if name in new_files else []
        if before != after:
            diff = difflib.unified_diff(before, after, n=0, lineterm="")
            yield from _places(FileId(library.name, name), list(diff)[2:])


def _code_lines(source: str) -> list[str]:
    """Return the lines of a file, those of docstrings and comments empty."""
    lines = source.splitlines()
    try:
        module = ast.parse(source)
    except SyntaxError:
        return lines
    for node in ast.walk(module):
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        first = node.body[0] if node.body else None
        if (
            isinstance(first, ast.Expr)
            and isinstance(first.value, ast.Constant)
            and first.end_lineno
        ):
            for number in range(first.lineno, first.end_lineno + 1):
                lines[number - 1] = ""
    return ["" if line.lstrip().startswith("#") else line for line in lines]


def places_of_diff(library: Library, diff: str) -> Iterator[ChangedPlace]:
    """Yield the changed places of a unified diff whose paths have the package's name in them, as git writes it."""
    file: FileId | None = None
    lines: list[str] = []
    old_name = ""
    for line in [*diff.splitlines(), "--- /dev/null"]:
        if line.startswith("--- "):
            if file is not None:
                yield from _places(file, lines)
            file, lines, old_name = None, [], line.removeprefix("--- ")
        elif line.startswith("+++ "):
            name = line.removeprefix("+++ ")
            file = _file_in(library, old_name if name.startswith("/dev/null") else name)
        elif line.startswith("diff --git "):
            continue
        else:
            lines.append(line)


def _file_in(library: Library, name: str) -> FileId | None:
    """Return the file that a path of a diff names; None if it is not of the package."""
    # git and diff write what they know of a file after a tab.
    path = name.partition("\t")[0].strip()
    _, separator, below = f"/{path}".partition(f"/{library.name}/")
    return FileId(library.name, below) if separator and below.endswith(".py") else None


def _places(file: FileId, diff: Iterable[str]) -> Iterator[ChangedPlace]:
    """Yield the changed places of a file from the hunks of a unified diff, which may show lines around them."""
    block = _Block(file)
    for line in diff:
        head = _HEAD.match(line)
        if head:
            yield from block.place()
            # A hunk without old lines names the one that it comes after, not its first.
            old_first = int(head[1]) if head[2] != "0" else int(head[1]) + 1
            new_first = int(head[3]) if head[4] != "0" else int(head[3]) + 1
            block.begin(old_first, new_first)
        elif line.startswith("-"):
            block.remove(line[1:])
        elif line.startswith("+"):
            block.add(line[1:])
        elif line.startswith(" ") or not line:
            yield from block.place()
            block.begin(block.old + 1, block.new + 1)
    yield from block.place()


class _Block:
    """The lines that follow each other in a diff; ``old`` and ``new`` are the next lines of both files."""

    def __init__(self, file: FileId) -> None:
        self._file = file
        self.begin(1, 1)

    def begin(self, old: int, new: int) -> None:
        """Begin anew, at these lines."""
        self.old, self.new, self._old_first, self._new_first = old, new, old, new
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
        text = [*self._added, *self._removed.values()][0]
        defines = not self._removed and bool(_DEFINITION.match(text))
        after = self._old_first - 1
        yield ChangedPlace(
            self._file, self._new_first, tuple(self._removed), after, text.strip(), defines
        )


def _is_code(text: str) -> bool:
    return bool(text.strip()) and not text.lstrip().startswith("#")


def reached_places(found: ReachMap, places: Iterable[ChangedPlace]) -> list[PlaceReach]:
    """Return for each place who executes it, by the map of the old release."""
    reached = []
    for place in places:
        file = found.files.get(place.file)
        if file is None or place.defines:
            reached.append(PlaceReach(place, "", ()))
        else:
            reached.append(_reached_place(found.coverage_of(place.file), place))
    return reached


def _reached_place(file: FileReach, place: ChangedPlace) -> PlaceReach:
    """Return who executes the old statements of a place, or those around it where lines are added only."""
    function = None
    bits = 0
    # The one before may be in another branch than the new lines, and so may the one after.
    for line in place.removed or (place.after, place.after + 1):
        # A place outside all functions runs on import.
        around = file.file.function_at(line) or file.file.function_at(line + 1)
        if around is None:
            continue
        function = function or around
        statement = 1 << file.file.statement_at(line)
        # A changed signature, or the first lines of a body: all that execute the function.
        bits |= statement if statement & around.body else around.body
    return PlaceReach(place, function.name if function else "", file.contexts_of_lines(bits))


def cells_by_specificity(reached: Iterable[PlaceReach]) -> list[CellReach]:
    """Return the cells that execute changed places, first those whose places few others execute."""
    places: dict[str, int] = {}
    alone: dict[str, int] = {}
    weight: dict[str, float] = {}
    for one in reached:
        cells = one.cells
        for cell in cells:
            places[cell] = places.get(cell, 0) + 1
            alone[cell] = alone.get(cell, 0) + (len(cells) == 1)
            weight[cell] = weight.get(cell, 0.0) + 1 / len(cells)
    found = [CellReach(cell, places[cell], alone[cell], weight[cell]) for cell in places]
    return sorted(found, key=lambda one: (-one.weight, one.cell))
