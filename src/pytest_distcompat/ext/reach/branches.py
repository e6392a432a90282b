"""All functions and branches of a source file, by coverage's static analysis.

For each branch it tells whether its condition reads an argument or a setting.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from pytest_distcompat.ext.reach.libraries import FileId
from pytest_distcompat.grouping import grouped

if TYPE_CHECKING:
    from coverage import Coverage
    from coverage.plugin import FileReporter

#: Names in a condition that say: it reads a setting.
_SETTING = re.compile(
    r"config|args|plugin|handler|setting|option|policy|environ|getenv|kwargs", re.IGNORECASE
)
#: How a branch out of its function is written where others have a line.
LEAVES = "exit"


class Rank(IntEnum):
    """How likely users run into a branch, the likeliest first."""

    PUBLIC_SETTING = 0
    PUBLIC = 1
    SETTING = 2
    INTERNAL = 3


@dataclass(frozen=True)
class Branch:
    """One way from a line that has several.

    Attributes:
        function: The qualified name of the function it is in.
        line: The line it leads from.
        target: The line it leads to; below 0 if it leaves the function.
        text: The source of its line.
        target_text: The source of the line that it leads to; empty if it leaves the function.
        rank: How likely users run into it.
    """

    function: str
    line: int
    target: int
    text: str
    target_text: str
    rank: Rank

    @property
    def arrow(self) -> str:
        """Return its lines as text: ``12 -> 15``."""
        if self.target > 0:
            return f"{self.line} -> {self.target}"
        return f"{self.line} -> {LEAVES}"


@dataclass(frozen=True)
class Function:
    """A function or method.

    Attributes:
        name: Its qualified name.
        first: The last line of its definition; the body begins after it.
        body: The lines of its body without those of functions inside it, as bits by line number.
        public: Whether users may call it.
    """

    name: str
    first: int
    body: int
    public: bool


@dataclass(frozen=True)
class SourceFile:
    """The functions of a file, and the branches in them.

    What a module does when it is imported is left out: fork servers import the libraries, not
    ranks.

    Attributes:
        statements: The first line of each statement, as bits; of these an executed line is one.
    """

    id: FileId
    functions: tuple[Function, ...]
    branches: tuple[Branch, ...]
    statements: int = 0

    def function_at(self, line: int) -> Function | None:
        """Return the innermost function whose body has that line; None if none has."""
        line_bit = 1 << line
        for function in self.functions:
            if function.body & line_bit:
                return function
        return None

    def statement_at(self, line: int) -> int:
        """Return the first line of the statement that a line is in; 0 if none begins before it."""
        up_to_line = (1 << (line + 1)) - 1
        statements = self.statements & up_to_line
        # The highest bit is the last statement that begins at or before the line.
        return max(statements.bit_length() - 1, 0)


@dataclass(frozen=True)
class Executed:
    """What an action executed of a file.

    Attributes:
        lines: The lines, as bits by number.
        branches: The branches, as bits by their place in ``SourceFile.branches``.
    """

    lines: int = 0
    branches: int = 0

    def __or__(self, other: Executed) -> Executed:
        """Return what either executed."""
        return Executed(self.lines | other.lines, self.branches | other.branches)


def bits_of(numbers: Iterable[int]) -> int:
    """Return the numbers as bits."""
    bits = 0
    for number in numbers:
        bits |= 1 << number
    return bits


def numbers_of(bits: int) -> Iterator[int]:
    """Yield the numbers of the bits that are set, ascending."""
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest


#: The number of a line, and that of the line that is executed next, as coverage has them. A number
#: below 0 stands for the way into a function or out of it. Not every arc is a branch.
_Arc = tuple[int, int]


class AnalysedFile:
    """A source file with the means to read a rank's arcs."""

    def __init__(self, path: Path, file_id: FileId) -> None:
        self._reporter = file_reporter(path)
        source = self._reporter.source()
        self._lines = ["", *source.splitlines()]
        self._scopes = _Scopes(ast.parse(source), file_id)
        self._arcs = sorted(self._reporter.arcs())
        statements = bits_of(self._reporter.lines())
        self.file = SourceFile(file_id, self._scopes.functions, self._branches(), statements)
        #: The place of each branch in ``branches``, by its line and target.
        self._number_by_arc: dict[_Arc, int] = {}
        for number, branch in enumerate(self.file.branches):
            self._number_by_arc[branch.line, branch.target] = number
        self._only_target = self._only_targets()
        #: What ``_translated`` returned for each arc.
        self._executed_by_arc: dict[_Arc, Executed] = {}

    def executed(self, arcs: Iterable[_Arc]) -> Executed:
        """Return the lines and branches of arcs that a rank has recorded."""
        lines = 0
        branches = 0
        for arc in arcs:
            if arc not in self._executed_by_arc:
                self._executed_by_arc[arc] = self._translated(arc)
            executed = self._executed_by_arc[arc]
            lines |= executed.lines
            branches |= executed.branches
        return Executed(lines, branches)

    def _translated(self, arc: _Arc) -> Executed:
        """Return the first lines of the two statements of an arc, and its branch, if it is one."""
        line_numbers = [number for number in arc if number > 0]
        lines = self._reporter.translate_lines(line_numbers)
        branches = []
        for line, target in self._reporter.translate_arcs([arc]):
            number = self._number_by_arc.get((line, target))
            if line == target and line in self._only_target:
                # sys.monitoring reports a line without where it leads; a line that leads nowhere
                # else is no branch.
                only_target = self._only_target[line]
                number = self._number_by_arc.get((line, only_target))
            if number is not None:
                branches.append(number)
        return Executed(bits_of(lines), bits_of(branches))

    def _branches(self) -> tuple[Branch, ...]:
        """Return the arcs from the lines of functions that have several.

        Lines that a comment excludes from coverage are left out.
        """
        exit_counts = self._reporter.exit_counts()
        excluded = self._reporter.no_branch_lines() | self._reporter.excluded_lines()
        branches = []
        for line, target in self._arcs:
            scope = self._scopes.at(line)
            if scope is None or exit_counts.get(line, 0) < 2:
                continue
            if line in excluded or target in excluded:
                continue
            condition = self._scopes.conditions.get(line)
            target_text = ""
            if target > 0:
                target_text = self._lines[target].strip()
            branch = Branch(
                function=scope.name,
                line=line,
                target=target,
                text=self._text(line),
                target_text=target_text,
                rank=scope.rank(condition),
            )
            branches.append(branch)
        return tuple(branches)

    def _text(self, line: int) -> str:
        """Return the source of a line, with all lines of a condition that takes several."""
        condition = self._scopes.conditions.get(line)
        last = line
        if condition is not None and condition.end_lineno is not None:
            # What a case matches stands above it.
            last = max(line, condition.end_lineno)
        texts = [text.strip() for text in self._lines[line : last + 1]]
        return " ".join(texts)

    def _only_targets(self) -> dict[int, int]:
        """Return the target of each line that leads to one line only."""
        only_target: dict[int, int] = {}
        for line, targets in grouped(self._arcs).items():
            if len(targets) == 1:
                only_target[line] = targets[0]
        return only_target


@dataclass(frozen=True)
class _Scope:
    """A function while its branches are read: ``arguments`` are the names of its parameters."""

    name: str
    first: int
    last: int
    public: bool
    arguments: frozenset[str]

    def rank(self, condition: ast.expr | None) -> Rank:
        """Return the rank of a branch with that condition."""
        reads_input = condition is not None and self._reads_input(condition)
        if self.public and reads_input:
            return Rank.PUBLIC_SETTING
        if self.public:
            return Rank.PUBLIC
        if reads_input:
            return Rank.SETTING
        return Rank.INTERNAL

    def _reads_input(self, condition: ast.expr) -> bool:
        """Tell whether a condition reads an argument of the function, or a setting."""
        for node in ast.walk(condition):
            if isinstance(node, ast.Name):
                if node.id in self.arguments or _SETTING.search(node.id):
                    return True
            elif isinstance(node, ast.Attribute) and _SETTING.search(node.attr):
                return True
        return False


_FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


class _Scopes:
    """The functions of a module, and the conditions of its branches by line."""

    def __init__(self, module: ast.Module, file_id: FileId) -> None:
        self._exported = _exported_names(module)
        module_path = PurePosixPath(file_id.path).with_suffix("")
        self._in_private_module = any(_is_private(part) for part in module_path.parts)
        self._scopes: list[_Scope] = []
        self._innermost: dict[int, _Scope] = {}
        self.conditions: dict[int, ast.expr] = {}
        self._read(module, ())
        self.functions = tuple(self._function(scope) for scope in self._scopes)

    def at(self, line: int) -> _Scope | None:
        """Return the innermost function around a line; None for a line that runs on import."""
        return self._innermost.get(line)

    def _read(self, node: ast.AST, names: tuple[str, ...]) -> None:
        """Read the functions and conditions below a node.

        Args:
            node: The node.
            names: The names of the functions and classes that it is in.
        """
        for child in ast.iter_child_nodes(node):
            self._read_condition(child)
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                inner_names = (*names, child.name)
                self._enter(child, inner_names)
                self._read(child, inner_names)
            elif isinstance(child, ast.ClassDef):
                self._read(child, (*names, child.name))
            else:
                self._read(child, names)

    def _read_condition(self, node: ast.AST) -> None:
        """Note what a statement reads to choose a branch, if it is one that does."""
        if isinstance(node, (ast.If, ast.While)):
            self.conditions[node.lineno] = node.test
        elif isinstance(node, (ast.For, ast.AsyncFor)):
            self.conditions[node.lineno] = node.iter
        elif isinstance(node, ast.Match):
            for case in node.cases:
                self.conditions[case.pattern.lineno] = node.subject

    def _enter(self, node: _FunctionNode, names: tuple[str, ...]) -> None:
        """Add a function.

        Args:
            node: Its definition.
            names: The names of the functions and classes around it, and its own.
        """
        # Python runs the definition where it stands, not in the function. A signature may take
        # several lines; the body of ``def f(): ...`` is on the line of its definition.
        first = node.body[0].lineno - 1
        last = node.end_lineno or node.lineno
        scope = _Scope(
            name=".".join(names),
            first=first,
            last=last,
            public=self._is_public(names),
            arguments=_argument_names(node.args),
        )
        self._scopes.append(scope)
        for line in range(first + 1, last + 1):
            # Functions inside it come later, and take their lines from it.
            self._innermost[line] = scope

    def _is_public(self, names: tuple[str, ...]) -> bool:
        """Tell whether users may call a function.

        The module's ``__all__`` says so; without it the names of the function and of the module do.
        """
        if any(_is_private(name) for name in names):
            return False
        if self._exported is not None:
            return names[0] in self._exported
        return not self._in_private_module

    def _function(self, scope: _Scope) -> Function:
        own_lines: list[int] = []
        for line in range(scope.first + 1, scope.last + 1):
            if self._innermost[line] is scope:
                own_lines.append(line)
        return Function(scope.name, scope.first, bits_of(own_lines), scope.public)


def _argument_names(arguments: ast.arguments) -> frozenset[str]:
    """Return the names of a function's parameters, without ``self`` and ``cls``."""
    parameters = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    if arguments.vararg is not None:
        parameters.append(arguments.vararg)
    if arguments.kwarg is not None:
        parameters.append(arguments.kwarg)
    names = {parameter.arg for parameter in parameters}
    return frozenset(names - {"self", "cls"})


def _exported_names(module: ast.Module) -> frozenset[str] | None:
    """Return the names in a module's ``__all__``; None if it has none that can be read."""
    for node in module.body:
        if not isinstance(node, ast.Assign):
            continue
        names = [ast.unparse(target) for target in node.targets]
        if names == ["__all__"]:
            try:
                return frozenset(ast.literal_eval(node.value))
            except (ValueError, TypeError):
                return None
    return None


def _is_private(name: str) -> bool:
    is_dunder = name.startswith("__") and name.endswith("__")
    return name.startswith("_") and not is_dunder


@functools.cache
def _analysis() -> Coverage:
    """Return a Coverage for the analysis of files, with coverage's default settings.

    It traces nothing.
    """
    from coverage import Coverage

    return Coverage(data_file=None, config_file=False, branch=True)


def file_reporter(path: Path) -> FileReporter:
    """Return coverage's reporter of a source file, whose methods are those of its plugins.

    The class is private; all that is called here of it is documented
    (https://coverage.readthedocs.io/en/latest/api_plugin.html#filereporter).
    ``tests/reach/test_private_names.py`` fails when it goes away.
    """
    from coverage.python import PythonFileReporter

    reporter: Any = PythonFileReporter(str(path), _analysis())
    return reporter  # type: ignore[no-any-return]
