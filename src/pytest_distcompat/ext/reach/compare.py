"""Two releases compared: new code of the later one, and code that test cells reach no more.

``distcompat reach MAP --compare EARLIER`` (``command``) calls ``compare`` with the *maps* of two
releases. A map says which *cells* (test configurations) reach which *branches* of the libraries; a
branch is one way from a line that has several.
"""

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
    #: The qualified name of its function.
    function: str
    #: The source of the line that it leads from: ``if self.fsdp_plugin:``.
    text: str
    #: The source of the line that it leads to; empty if it leaves the function.
    target_text: str

    @classmethod
    def of(cls, file: FileId, branch: Branch) -> Signature:
        """Return the signature of a branch in that file."""
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
    # How many branches of each signature the earlier release has. Each branch of the later one uses
    # up one of them: the same text may stand several times in a function.
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
            known[signature] -= 1
            # Lost is as many of them as are reached less often than before.
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
