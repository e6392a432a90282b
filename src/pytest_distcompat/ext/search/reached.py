"""Which branches of library code runs have executed, and which a map says are executed.

A branch is one outcome of a condition in a library's source: the ``if`` is true, or it is false.
``ext.reach`` records branches: ranks write the executed lines to files in the directory of their
run, and ``--distcompat-reach FILE`` writes a *map* of the branches that each cell of a session
executes.

``trial`` calls ``InstalledBranches.read`` after the runs of a candidate. ``command`` calls
``read_reached`` with the map of ``--map``. This is the only module of ``ext.search`` that imports
``ext.reach``, besides ``trial``, which names its tracer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pytest_distcompat.ext.reach.analysis import AnalysedFile
from pytest_distcompat.ext.reach.branches import bits_of, numbers_of
from pytest_distcompat.ext.reach.libraries import FileId, installed_files, installed_versions
from pytest_distcompat.ext.reach.rank_files import reach_files
from pytest_distcompat.ext.reach.store import read_map
from pytest_distcompat.failures import UsageProblem

#: A name in source code, also inside a string, as in ``config.get("overlap_comm")``.
_NAME = re.compile(r"[A-Za-z_]\w+")


@dataclass
class Branches:
    """A set of branches in several files.

    Attributes:
        bits: File -> an integer. Its bit ``n`` is set if branch number ``n`` of the file is in the
            set: ``0b101`` for branches 0 and 2.
    """

    bits: dict[FileId, int] = field(default_factory=dict)

    def __len__(self) -> int:
        """Return the number of branches."""
        return sum(bits.bit_count() for bits in self.bits.values())

    def add(self, other: Branches) -> None:
        """Add all branches of another set."""
        for file_id, bits in other.bits.items():
            self.bits[file_id] = self.bits.get(file_id, 0) | bits

    def without(self, other: Branches) -> Branches:
        """Return the branches that are not in the other set."""
        remaining_bits: dict[FileId, int] = {}
        for file_id, bits in self.bits.items():
            remaining = bits & ~other.bits.get(file_id, 0)
            if remaining:
                remaining_bits[file_id] = remaining
        return Branches(remaining_bits)

    def as_data(self) -> dict[str, list[int]]:
        """Return data for JSON: ``LIBRARY/PATH`` of the file -> the numbers of the branches."""
        numbers: dict[str, list[int]] = {}
        for file_id, bits in self.bits.items():
            numbers[str(file_id)] = list(numbers_of(bits))
        return numbers

    @classmethod
    def from_data(cls, data: dict[str, list[int]]) -> Branches:
        """Return the set of which ``as_data`` returned this data."""
        bits: dict[FileId, int] = {}
        for text, numbers in data.items():
            library, _, path = text.partition("/")
            bits[FileId(library, path)] = bits_of(numbers)
        return cls(bits)


class InstalledBranches:
    """Finds the branches of installed libraries that runs have executed.

    Ranks record arcs: pairs of numbers of lines that were executed one after the other. To turn
    arcs into branches, a source file must be analysed. That is done once, when the file is first
    needed.
    """

    def __init__(self) -> None:
        self._paths: dict[FileId, Path] = {}
        for path, file_id in installed_files().items():
            self._paths[file_id] = path
        self._analysed: dict[FileId, AnalysedFile] = {}

    def read(self, directories: Iterable[Path]) -> Branches:
        """Return the branches that the ranks of some runs have executed.

        Args:
            directories: The directories of the runs.
        """
        branches = Branches()
        for directory in directories:
            for path in reach_files(directory):
                branches.add(self._of_rank(path))
        return branches

    def _of_rank(self, path: Path) -> Branches:
        """Return the branches that one rank executed, from the file that its tracer wrote.

        The file has ``{"files": [[LIBRARY, PATH], ...], "actions": {ACTION: {NUMBER: LINES}}}``,
        with the lines that each action of the rank (``build``, ``step``, ...) executed in each
        file.
        """
        recorded = json.loads(path.read_text(encoding="utf-8"))
        file_ids = [FileId(library, name) for library, name in recorded["files"]]
        branches = Branches()
        for lines_by_file in recorded["actions"].values():
            for number, lines in lines_by_file.items():
                file_id = file_ids[int(number)]
                # Tracing also covers directories whose branches do not count.
                if file_id not in self._paths:
                    continue
                # The lines are: from, to, from, to, and so on.
                starts = lines[::2]
                ends = lines[1::2]
                arcs = zip(starts, ends, strict=True)
                executed = self._file(file_id).executed(arcs)
                branches.add(Branches({file_id: executed.branches}))
        return branches

    def _file(self, file_id: FileId) -> AnalysedFile:
        """Return the analysis of a file."""
        if file_id not in self._analysed:
            self._analysed[file_id] = AnalysedFile(self._paths[file_id], file_id)
        return self._analysed[file_id]

    def functions(self, branches: Branches) -> Iterator[str]:
        """Yield the functions that have the branches, with how many, the largest numbers first.

        A text is ``torchao/optim/adam.py _AdamBase.step: 11``.
        """
        counts: dict[str, int] = {}
        for file_id, bits in branches.bits.items():
            all_branches = self._file(file_id).file.branches
            for number in numbers_of(bits):
                name = f"{file_id} {all_branches[number].function}"
                counts[name] = counts.get(name, 0) + 1

        def largest_first(name: str) -> tuple[int, str]:
            return -counts[name], name

        for name in sorted(counts, key=largest_first):
            yield f"{name}: {counts[name]}"


@dataclass(frozen=True)
class Reached:
    """What a map of ``distcompat reach`` says about all cells together.

    Attributes:
        branches: The branches that at least one cell executes.
        readers: Name -> how many branches that no cell executes have it in their condition. A
            setting whose field has the name may lead there.
    """

    branches: Branches = field(default_factory=Branches)
    readers: dict[str, int] = field(default_factory=dict)


def read_reached(path: Path) -> Reached:
    """Return what a map says.

    Args:
        path: The file that ``--distcompat-reach`` wrote.

    Raises:
        UsageProblem: If the map cannot be read, or was made with other releases of the libraries
            than those installed.
    """
    reach_map = read_map(path)
    for name, version in installed_versions().items():
        mapped = reach_map.versions.get(name, version)
        if mapped != version:
            raise UsageProblem(
                f"{path}: the map is of {name} {mapped}, and {version} is installed; "
                "write a new one"
            )
    reached = Reached()
    # A context is who executed something: a driver, a cell and an action, such as ``save``.
    for file_id, by_context in reach_map.executed.items():
        for executed in by_context.values():
            reached.branches.add(Branches({file_id: executed.branches}))
    for file_id, file in reach_map.files.items():
        bits = reached.branches.bits.get(file_id, 0)
        for number, branch in enumerate(file.branches):
            is_executed = bits >> number & 1
            if is_executed:
                continue
            for name in set(_NAME.findall(branch.text)):
                reached.readers[name] = reached.readers.get(name, 0) + 1
    return reached
