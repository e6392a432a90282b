"""Analysis of one source file: its functions and branches, and what a rank's record says of them.

``collect`` makes an ``AnalysedFile`` for each file of the installed libraries that reach looks at.
coverage.py says statically which lines have several ways out (branches). In a *rank*, a process
that trains, coverage also records *arcs* while it runs: pairs (number of a line, number of the line
that was executed next). ``executed`` turns the arcs of a rank into lines and branches of the file.

A set of numbers is kept as bits of an integer: lines 1 and 3 are ``0b1010`` (``bits_of``).
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_distcompat.ext.reach.branches import Branch, Executed, SourceFile, bits_of
from pytest_distcompat.ext.reach.libraries import FileId
from pytest_distcompat.ext.reach.scopes import Scopes
from pytest_distcompat.grouping import grouped

if TYPE_CHECKING:
    from coverage import Coverage
    from coverage.plugin import FileReporter

#: The number of a line, and that of the line that is executed next, as coverage has them. A number
#: below 0 stands for the way into a function or out of it. Not every arc is a branch.
_Arc = tuple[int, int]


class AnalysedFile:
    """A source file with the means to read a rank's arcs.

    Args:
        path: Where the file is installed.
        file_id: Its name, which is the same on all machines.
    """

    def __init__(self, path: Path, file_id: FileId) -> None:
        self._reporter = file_reporter(path)
        source = self._reporter.source()
        #: The lines of the source; the first one has the index 1.
        self._lines = ["", *source.splitlines()]
        #: The functions, and by line the condition of each statement that chooses a branch.
        self._scopes = Scopes(ast.parse(source), file_id)
        #: All arcs that are possible by the source.
        self._arcs = sorted(self._reporter.arcs())
        statements = bits_of(self._reporter.lines())
        self.file = SourceFile(file_id, self._scopes.functions, self._branches(), statements)
        #: The place of each branch in ``branches``, by its line and target.
        self._number_by_arc: dict[_Arc, int] = {}
        for number, branch in enumerate(self.file.branches):
            self._number_by_arc[branch.line, branch.target] = number
        self._only_target = self._only_targets()
        #: What ``_translated`` returned for each arc: most arcs are those of many ranks.
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
        """Return the first lines of the two statements of an arc, and its branch, if it is one.

        A rank's arc may begin or end within a statement that takes several lines. coverage
        translates its lines to the first ones, which the branches have.
        """
        line_numbers = [number for number in arc if number > 0]
        lines = self._reporter.translate_lines(line_numbers)
        branches = []
        for line, target in self._reporter.translate_arcs([arc]):
            number = self._number_by_arc.get((line, target))
            if line == target and line in self._only_target:
                # With sys.monitoring (from Python 3.14 on) coverage reports a line without where it
                # leads, as an arc to itself. If it can lead to one line only, that is the target.
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
            # Outside of functions, or a line with one way out.
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
                # How likely users run into it, not a process that trains.
                rank=scope.rank(condition),
            )
            branches.append(branch)
        return tuple(branches)

    def _text(self, line: int) -> str:
        """Return the source of a line, with all lines of a condition that takes several."""
        condition = self._scopes.conditions.get(line)
        last = line
        if condition is not None and condition.end_lineno is not None:
            # The condition of a ``case`` is the subject of its ``match``, which stands above it.
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


@functools.cache
def _analysis() -> Coverage:
    """Return a Coverage that analyses files with coverage's default settings; it traces nothing."""
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
