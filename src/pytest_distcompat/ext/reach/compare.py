"""Two releases compared: code of the later one that is new and that no cell reaches, and what cells reach no more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from pytest_distcompat.ext.reach.branches import Branch
from pytest_distcompat.ext.reach.libraries import FileId
from pytest_distcompat.ext.reach.map import BranchReach, ReachMap


@dataclass(frozen=True)
class Signature:
    """A branch by what its source says, since a release moves lines."""

    file: FileId
    function: str
    text: str
    target_text: str

    @classmethod
    def of(cls, file: FileId, branch: Branch) -> Signature:
        """Return that of a branch."""
        return cls(file, branch.function, branch.text, branch.target_text)


@dataclass(frozen=True)
class Comparison:
    """Branches of the later release.

    Attributes:
        unreached: New ones that no cell reaches.
        reached: New ones that some cell reaches.
        lost: Old ones that a cell of the earlier map reaches, and none of the later one.
    """

    unreached: tuple[BranchReach, ...]
    reached: tuple[BranchReach, ...]
    lost: tuple[BranchReach, ...]


def compare(earlier: ReachMap, later: ReachMap) -> Comparison:
    """Compare the maps of two releases, of the libraries that both have."""
    known = Counter(signature for signature, _ in _signatures(earlier))
    formerly_reached = Counter(signature for signature, one in _signatures(earlier) if one.contexts)
    still_reached = Counter(signature for signature, one in _signatures(later) if one.contexts)
    shared = set(earlier.libraries())
    unreached: list[BranchReach] = []
    reached: list[BranchReach] = []
    lost: list[BranchReach] = []
    for signature, one in _signatures(later):
        if one.file.library not in shared:
            continue
        if not known[signature]:
            (reached if one.contexts else unreached).append(one)
            continue
        # The same text may stand several times in a function.
        known[signature] -= 1
        if not one.contexts and formerly_reached[signature] > still_reached[signature]:
            formerly_reached[signature] -= 1
            lost.append(one)
    return Comparison(tuple(unreached), tuple(reached), tuple(lost))


def _signatures(found: ReachMap) -> Iterator[tuple[Signature, BranchReach]]:
    for file_id in found.files:
        for one in found.coverage_of(file_id).branches():
            yield Signature.of(file_id, one.branch), one
