"""Branches that candidates reach: the only module of the search that knows the package ``reach``."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pytest_distcompat.ext.reach.branches import AnalysedFile, numbers_of
from pytest_distcompat.ext.reach.libraries import FileId, installed_files, installed_versions
from pytest_distcompat.ext.reach.rank_files import reach_files
from pytest_distcompat.ext.reach.store import read_map
from pytest_distcompat.failures import UsageProblem

#: A name, also one in a text: ``config.get("overlap_comm")``.
_NAME = re.compile(r"[A-Za-z_]\w+")


@dataclass
class Branches:
    """Branches of several files, as bits by their numbers in each."""

    bits: dict[FileId, int] = field(default_factory=dict)

    def __len__(self) -> int:
        """Return how many there are."""
        return sum(bits.bit_count() for bits in self.bits.values())

    def add(self, other: Branches) -> None:
        """Add those of another one."""
        for file_id, bits in other.bits.items():
            self.bits[file_id] = self.bits.get(file_id, 0) | bits

    def without(self, other: Branches) -> Branches:
        """Return those that another one lacks."""
        rest: dict[FileId, int] = {}
        for file_id, bits in self.bits.items():
            left = bits & ~other.bits.get(file_id, 0)
            if left:
                rest[file_id] = left
        return Branches(rest)

    def as_data(self) -> dict[str, list[int]]:
        """Return them as a file has them."""
        return {str(file_id): list(numbers_of(bits)) for file_id, bits in self.bits.items()}

    @classmethod
    def from_data(cls, data: dict[str, list[int]]) -> Branches:
        """Return what ``as_data`` wrote."""
        found: dict[FileId, int] = {}
        for text, numbers in data.items():
            library, _, path = text.partition("/")
            found[FileId(library, path)] = sum(1 << number for number in numbers)
        return cls(found)


class InstalledBranches:
    """The branches of what is installed here, for the arcs that ranks have recorded. A file is analysed when it is met first."""

    def __init__(self) -> None:
        self._paths = {file_id: path for path, file_id in installed_files().items()}
        self._analysed: dict[FileId, AnalysedFile] = {}

    def read(self, directories: Iterable[Path]) -> Branches:
        """Return the branches that the ranks of these runs have reached."""
        found = Branches()
        for directory in directories:
            for path in reach_files(directory):
                found.add(self._of_rank(path))
        return found

    def _of_rank(self, path: Path) -> Branches:
        written = json.loads(path.read_text(encoding="utf-8"))
        file_ids = [FileId(library, name) for library, name in written["files"]]
        found = Branches()
        for arcs_of in written["actions"].values():
            for number, lines in arcs_of.items():
                file_id = file_ids[int(number)]
                # A directory of a library that is left out is traced too.
                if file_id in self._paths:
                    arcs = zip(lines[::2], lines[1::2], strict=True)
                    executed = self._file(file_id).executed(arcs)
                    found.add(Branches({file_id: executed.branches}))
        return found

    def _file(self, file_id: FileId) -> AnalysedFile:
        if file_id not in self._analysed:
            self._analysed[file_id] = AnalysedFile(self._paths[file_id], file_id)
        return self._analysed[file_id]

    def functions(self, branches: Branches) -> Iterator[str]:
        """Yield the functions that have these branches, with the number of them: those that have most come first."""
        counts: dict[str, int] = {}
        for file_id, bits in branches.bits.items():
            all_branches = self._file(file_id).file.branches
            for number in numbers_of(bits):
                name = f"{file_id} {all_branches[number].function}"
                counts[name] = counts.get(name, 0) + 1
        for name in sorted(counts, key=lambda name: (-counts[name], name)):
            yield f"{name}: {counts[name]}"


@dataclass(frozen=True)
class Reached:
    """What a map says.

    Attributes:
        branches: The branches that some cell reaches.
        readers: For each name in a condition, how many branches that no cell reaches read it.
    """

    branches: Branches = field(default_factory=Branches)
    readers: dict[str, int] = field(default_factory=dict)


def read_reached(path: Path) -> Reached:
    """Return what a map says.

    Raises:
        UsageProblem: The map cannot be read, or is of other releases than those installed.
    """
    reach_map = read_map(path)
    for name, version in installed_versions().items():
        mapped = reach_map.versions.get(name, version)
        if mapped != version:
            raise UsageProblem(
                f"{path}: the map is of {name} {mapped}, and {version} is installed; write a new one"
            )
    reached = Reached()
    for file_id, by_context in reach_map.executed.items():
        for executed in by_context.values():
            reached.branches.add(Branches({file_id: executed.branches}))
    for file_id, file in reach_map.files.items():
        bits = reached.branches.bits.get(file_id, 0)
        for number, branch in enumerate(file.branches):
            if not bits >> number & 1:
                for name in set(_NAME.findall(branch.text)):
                    reached.readers[name] = reached.readers.get(name, 0) + 1
    return reached
