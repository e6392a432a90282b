"""``ReachMap``: which test cells execute which functions and branches of the libraries.

A *cell* is one configuration of the tests: strategy, precision, number of ranks and options, such
as ``fsdp2-fp32-w2``; a *driver* is the trainer that it tests, such as ``accelerate``. ``collect``
makes the map of a pytest session from what the *ranks*, the processes that train, have recorded.
``store`` writes and reads it. ``text``, ``page``, ``compare``, ``changed`` and others ask it: the
whole map by ``ReachMap``, one file by ``FileReach``.

It has all functions and branches of the training code of the installed libraries, executed or not,
and for each the *contexts* that execute it: driver, cell, and *action*, which is what a rank does,
such as ``build`` or ``step``.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from pytest_distcompat.ext.reach.branches import Branch, Executed, Function, SourceFile
from pytest_distcompat.ext.reach.libraries import FileId


@dataclass(frozen=True, order=True)
class Context:
    """Who executed something: a driver, the cell whose check needs the run, and the action.

    A run is one process group from start to end. It may train otherwise than the cell says, as a
    reference on one process does. If several cells share a run, the context has one of them.
    """

    #: Such as ``accelerate``.
    driver: str
    #: Such as ``fsdp2-fp32-w2``.
    cell: str
    #: Such as ``build``, ``step``, or ``start``, which is all before the first action.
    action: str

    @property
    def driver_and_cell(self) -> str:
        """Return driver and cell as one text: ``accelerate/fsdp2-fp32-w2``."""
        return f"{self.driver}/{self.cell}"

    def matches(self, pattern: str) -> bool:
        """Tell whether a pattern fits the cell (``fsdp2-*``) or driver and cell (``torch/*``)."""
        if fnmatch.fnmatchcase(self.cell, pattern):
            return True
        return fnmatch.fnmatchcase(self.driver_and_cell, pattern)


#: What each context executed of one file.
ByContext = dict[Context, Executed]


@dataclass
class ReachMap:
    """Which cells execute which functions and branches of the installed libraries.

    Attributes:
        versions: Library -> its release; also those of ``python`` and ``coverage``.
        files: All files of the libraries' training code, by library and path.
        executed: File -> context -> the lines and branches that it executed. Files that nobody
            executed are missing.
    """

    versions: dict[str, str] = field(default_factory=dict)
    files: dict[FileId, SourceFile] = field(default_factory=dict)
    executed: dict[FileId, ByContext] = field(default_factory=dict)

    def add(self, file: FileId, context: Context, executed: Executed) -> None:
        """Add what a context executed of a file."""
        by_context = self.executed.setdefault(file, {})
        by_context[context] = by_context.get(context, Executed()) | executed

    def merge(self, other: ReachMap) -> None:
        """Add another map of the same releases, such as that of another shard.

        Raises:
            ValueError: It is of other releases; the message names them.
        """
        differing = []
        for name in sorted(self.versions.keys() & other.versions.keys()):
            version = self.versions[name]
            other_version = other.versions[name]
            if version != other_version:
                differing.append(f"{name} {version} and {other_version}")
        if differing:
            raise ValueError(f"they are of different releases: {', '.join(differing)}")
        for file_id, file in other.files.items():
            if self.files.setdefault(file_id, file) != file:
                raise ValueError(f"{file_id} is another one in each")
        self.versions.update(other.versions)
        for file_id, by_context in other.executed.items():
            for context, executed in by_context.items():
                self.add(file_id, context, executed)

    def contexts(self) -> list[Context]:
        """Return all contexts, sorted."""
        contexts: set[Context] = set()
        for by_context in self.executed.values():
            contexts.update(by_context)
        return sorted(contexts)

    def only(self, pattern: str) -> ReachMap:
        """Return the map of the cells that match the pattern (``Context.matches``)."""
        selected = ReachMap(self.versions, self.files)
        for file_id, by_context in self.executed.items():
            selected.executed[file_id] = {}
            for context, executed in by_context.items():
                if context.matches(pattern):
                    selected.executed[file_id][context] = executed
        return selected

    def libraries(self) -> list[str]:
        """Return the names of the libraries, in the order of their files."""
        return list(dict.fromkeys(file.library for file in self.files))

    def coverage_of(self, file_id: FileId) -> FileReach:
        """Return what is executed of one file."""
        return FileReach(self.files[file_id], self.executed.get(file_id, {}))

    def coverage_of_library(self, library: str) -> Iterator[FileReach]:
        """Yield what is executed of each file of a library."""
        for file_id in self.files:
            if file_id.library == library:
                yield self.coverage_of(file_id)


@dataclass(frozen=True)
class Counts:
    """Numbers of functions and branches: how many there are, and how many some cell reaches."""

    functions: int = 0
    reached_functions: int = 0
    branches: int = 0
    reached_branches: int = 0
    files: int = 0
    reached_files: int = 0

    @classmethod
    def total(cls, several: Iterable[Counts]) -> Counts:
        """Return the sums of all numbers."""
        # The names of the fields.
        sums = dict.fromkeys(vars(cls()), 0)
        for counts in several:
            for name, number in vars(counts).items():
                sums[name] += number
        return cls(**sums)

    @property
    def percent(self) -> float:
        """Return the share of branches that are reached, in percent; 100 where there are none."""
        if not self.branches:
            return 100.0
        return 100 * self.reached_branches / self.branches


@dataclass(frozen=True)
class BranchReach:
    """A branch, its file, and the contexts that reach it."""

    file: FileId
    branch: Branch
    contexts: tuple[Context, ...]

    @property
    def order(self) -> tuple[object, ...]:
        """Return the key by which branches are sorted: the likeliest for users come first."""
        return (self.branch.rank, self.file, self.branch.line, self.branch.target)


@dataclass(frozen=True)
class FunctionReach:
    """A function, whether any cell executes it, and its branches."""

    function: Function
    contexts: tuple[Context, ...]
    branches: tuple[BranchReach, ...]


class FileReach:
    """What is executed of one file.

    Args:
        file: The file, with its functions and branches.
        executed: The lines and branches that each context executed.
    """

    def __init__(self, file: SourceFile, executed: Mapping[Context, Executed]) -> None:
        self.file = file
        self._executed = executed
        #: What any context executed.
        self.union = Executed()
        for executed_by_context in executed.values():
            self.union |= executed_by_context

    def counts(self) -> Counts:
        """Return the numbers of functions and branches of the file, and of those reached."""
        reached_functions = 0
        for function in self.file.functions:
            if function.body & self.union.lines:
                reached_functions += 1
        return Counts(
            functions=len(self.file.functions),
            reached_functions=reached_functions,
            branches=len(self.file.branches),
            reached_branches=self.union.branches.bit_count(),
            files=1,
            reached_files=int(bool(self.union.lines)),
        )

    def branches(self) -> Iterator[BranchReach]:
        """Yield the branches, by line."""
        for number, branch in enumerate(self.file.branches):
            yield BranchReach(self.file.id, branch, self.contexts_of_branches(1 << number))

    def functions(self) -> Iterator[FunctionReach]:
        """Yield the functions with their branches, by line."""
        #: The name of a function -> its branches.
        branches: dict[str, list[BranchReach]] = {}
        for branch_reach in self.branches():
            branches.setdefault(branch_reach.branch.function, []).append(branch_reach)
        for function in self.file.functions:
            # Of several functions with one name, such as a property's getter and setter, the first
            # has all branches.
            own_branches = tuple(branches.pop(function.name, ()))
            contexts = self.contexts_of_lines(function.body)
            yield FunctionReach(function, contexts, own_branches)

    def contexts_of_lines(self, lines: int) -> tuple[Context, ...]:
        """Return the contexts that execute any of these lines, which are bits."""
        return self._contexts_where(lambda executed: executed.lines & lines)

    def contexts_of_branches(self, branches: int) -> tuple[Context, ...]:
        """Return the contexts that execute any of these branches, which are bits."""
        return self._contexts_where(lambda executed: executed.branches & branches)

    def _contexts_where(self, shared_bits: Callable[[Executed], int]) -> tuple[Context, ...]:
        """Return the contexts for which ``shared_bits`` is not 0, sorted."""
        # Most code is executed by no context: asking the union once saves asking each of them.
        if not shared_bits(self.union):
            return ()
        contexts: list[Context] = []
        for context, executed in self._executed.items():
            if shared_bits(executed):
                contexts.append(context)
        return tuple(sorted(contexts))
