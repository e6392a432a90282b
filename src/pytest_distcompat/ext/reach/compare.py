"""Two releases compared: new code of the later one, and code that cells reach no more."""

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
    formerly_reached = _count_reached(earlier)
    still_reached = _count_reached(later)
    shared = set(earlier.libraries())
    unreached: list[BranchReach] = []
    reached: list[BranchReach] = []
    lost: list[BranchReach] = []
    for signature, branch in _signatures(later):
        if branch.file.library not in shared:
            continue
        is_new = not known[signature]
        if is_new and branch.contexts:
            reached.append(branch)
        elif is_new:
            unreached.append(branch)
        else:
            # The same text may stand several times in a function.
            known[signature] -= 1
            if not branch.contexts and formerly_reached[signature] > still_reached[signature]:
                formerly_reached[signature] -= 1
                lost.append(branch)
    return Comparison(tuple(unreached), tuple(reached), tuple(lost))


def _count_reached(reach_map: ReachMap) -> Counter[Signature]:
    """Return how many branches of each signature some cell reaches."""
    counts: Counter[Signature] = Counter()
    for signature, branch in _signatures(reach_map):
        if branch.contexts:
            counts[signature] += 1
    return counts


def _signatures(reach_map: ReachMap) -> Iterator[tuple[Signature, BranchReach]]:
    """Yield all branches of a map, each with its signature."""
    for file_id in reach_map.files:
        for branch in reach_map.coverage_of(file_id).branches():
            yield Signature.of(file_id, branch.branch), branch
