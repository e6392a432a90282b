"""The functions and branches of a source file, and what was executed of them, as plain data.

A *branch* is one way from a line that has several: ``if x:`` on line 12 has the branches ``12 ->
13`` and ``12 -> 15``. ``analysis`` makes a ``SourceFile`` for each file of the libraries that reach
looks at. ``map`` keeps for each test cell which lines and branches of a file it executed
(``Executed``), and ``store`` writes all that to a file.

Sets of numbers are kept as *bits* of one integer, because there are many and they are mostly
combined: the lines 1 and 3 are ``0b1010``, and ``|`` and ``&`` give the union and intersection.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum

from pytest_distcompat.ext.reach.libraries import FileId

#: What stands for the target of a branch that leaves its function: ``12 -> exit``.
LEAVES = "exit"


class Rank(IntEnum):
    """How likely users run into a branch, the likeliest first."""

    #: In a function that users may call; its condition reads an argument or a setting.
    PUBLIC_SETTING = 0
    #: In a function that users may call.
    PUBLIC = 1
    #: In another function; its condition reads an argument or a setting.
    SETTING = 2
    #: Any other.
    INTERNAL = 3


@dataclass(frozen=True)
class Branch:
    """One way from a line that has several.

    Attributes:
        function: The qualified name of the function it is in: ``Accelerator.prepare``.
        line: The line it leads from, from 1.
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
        first: The line before the first one of its body: usually the end of ``def f(...):``.
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

    What a module does when it is imported is left out: the ranks (processes that train) are forked
    from a process that has imported the libraries already.

    Attributes:
        id: Library and path: ``accelerate/accelerator.py``.
        functions: Its functions; a function inside another comes after that.
        branches: The branches in its functions, by line.
        statements: The first line of each statement, as bits. A statement may take several lines;
            only its first one counts as executed.
    """

    id: FileId
    functions: tuple[Function, ...]
    branches: tuple[Branch, ...]
    statements: int = 0

    def function_at(self, line: int) -> Function | None:
        """Return the innermost function whose body has that line; None if none has."""
        # The lines of a function inside another are in the body of the inner one only.
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
    """What was executed of a file, by one action (such as ``step``) of a test cell, or by several.

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
    """Return the numbers as bits: ``0b1010`` for 1 and 3."""
    bits = 0
    for number in numbers:
        bits |= 1 << number
    return bits


def numbers_of(bits: int) -> Iterator[int]:
    """Yield the numbers of the bits that are set, ascending."""
    while bits:
        # In two's complement this has just the lowest bit that is set.
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest
