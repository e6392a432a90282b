"""The state of a search: which candidates were tried and kept, and which failed.

It is in a file, from which the search goes on, and to which the states of others can be added.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest_distcompat.ext.search.candidate import Candidate
from pytest_distcompat.ext.search.reached import Branches
from pytest_distcompat.ext.search.yields import Yields
from pytest_distcompat.failures import UsageProblem

#: The version of the file; one of another version is not read.
FORMAT = 1
#: What differs between failures of one cause: ranks, addresses and digests, numbers.
_CHANCE = re.compile(r"\branks? [\d, ]+|\ball ranks|0x[0-9a-f]+|\b[0-9a-f]{16}\b|\d[\d.e+-]*")
#: The arguments of the call that a problem begins with.
_ARGUMENTS = re.compile(r"^(\w+)\([^)]*\)")
#: How many functions of an entry are written down, those with most new branches.
_FUNCTIONS_WRITTEN = 3


#: An object of a JSON file.
_Data = dict[str, Any]


@dataclass
class Kept:
    """A candidate that reached something new.

    Attributes:
        candidate: The candidate.
        branches: The branches that were new then.
        functions: The functions that have most of them, with their number.
        barren: How many neighbours reached nothing new since one last did.
    """

    candidate: Candidate
    branches: Branches
    functions: tuple[str, ...] = ()
    barren: int = 0

    def as_data(self) -> _Data:
        """Return it as a state's file has it."""
        return {
            **self.candidate.as_data(),
            "functions": list(self.functions),
            "barren": self.barren,
            "branches": self.branches.as_data(),
        }

    @classmethod
    def from_data(cls, data: _Data) -> Kept:
        """Return what ``as_data`` wrote."""
        return cls(
            Candidate.from_data(data),
            Branches.from_data(data["branches"]),
            tuple(data["functions"]),
            data["barren"],
        )


@dataclass
class Found:
    """A candidate that breaks the law, reduced.

    Attributes:
        candidate: The smallest candidate that fails so.
        problem: How it fails.
        times: How many candidates failed so.
    """

    candidate: Candidate
    problem: str
    times: int = 1

    @property
    def cause(self) -> str:
        """Return how it fails, without what is chance."""
        return cause_of(self.problem)

    def as_data(self) -> _Data:
        """Return it as a state's file has it."""
        return {**self.candidate.as_data(), "problem": self.problem, "times": self.times}

    @classmethod
    def from_data(cls, data: _Data) -> Found:
        """Return what ``as_data`` wrote."""
        return cls(Candidate.from_data(data), data["problem"], data["times"])


def cause_of(problem: str) -> str:
    """Return a problem without what differs between failures of one cause."""
    without_arguments = _ARGUMENTS.sub(r"\1()", problem)
    return _CHANCE.sub("", without_arguments)


@dataclass
class State:
    """What a search knows.

    Attributes:
        seed: What it draws by.
        shard: Its part of several, as ``1/2``.
        versions: The release of each library.
        tried: All candidates, as text, in their order, with the number of branches that each one
            reached first.
        refused: How many of them the stack refused in words.
        seconds: How long it has run.
        kept: What reached something new.
        found: What breaks the law.
    """

    seed: int = 0
    shard: str = "1/1"
    versions: dict[str, str] = field(default_factory=dict)
    tried: dict[str, int] = field(default_factory=dict)
    refused: int = 0
    seconds: float = 0.0
    kept: list[Kept] = field(default_factory=list)
    found: list[Found] = field(default_factory=list)

    @property
    def new_branches(self) -> Branches:
        """Return all branches that its candidates were the first to reach."""
        branches = Branches()
        for kept in self.kept:
            branches.add(kept.branches)
        return branches

    def yields(self, readers: Mapping[str, int]) -> Yields:
        """Return what the candidates tried so far have yielded; ``readers`` as for ``Yields``."""
        yields = Yields(readers)
        new_by_text: dict[str, int] = {}
        for kept in self.kept:
            new_by_text[str(kept.candidate)] = len(kept.branches)
        for text in self.tried:
            yields.add(Candidate.parse(text), new_by_text.get(text, 0))
        return yields

    def add(self, other: State) -> None:
        """Add what another search knows, such as that of another shard."""
        if self.versions != other.versions:
            raise UsageProblem("the searches are of different releases of the libraries")
        self.tried.update(other.tried)
        self.refused += other.refused
        self.seconds += other.seconds
        self.kept += other.kept
        for finding in other.found:
            known = self.finding(finding.cause)
            if known is None:
                self.found.append(finding)
            else:
                known.times += finding.times

    def finding(self, cause: str) -> Found | None:
        """Return the finding with that cause; None if there is none."""
        for finding in self.found:
            if finding.cause == cause:
                return finding
        return None

    def write(self, path: Path) -> None:
        """Write it to a file, which is whole at any moment."""
        data = {
            "format": FORMAT,
            "seed": self.seed,
            "shard": self.shard,
            "versions": self.versions,
            "refused": self.refused,
            "seconds": round(self.seconds, 1),
            "tried": self.tried,
            "kept": [kept.as_data() for kept in self.kept],
            "found": [finding.as_data() for finding in self.found],
        }
        partial = path.with_name(f"{path.name}.part")
        partial.write_text(json.dumps(data), encoding="utf-8")
        partial.replace(path)

    @classmethod
    def read(cls, path: Path) -> State:
        """Return what ``write`` wrote.

        Raises:
            UsageProblem: The file is another one, or cannot be read.
        """
        try:
            data: _Data = json.loads(path.read_text(encoding="utf-8"))
            if data["format"] != FORMAT:
                raise UsageProblem(
                    f"{path}: expected a state of format {FORMAT}, found {data['format']}"
                )
            return cls(
                kept=[Kept.from_data(entry) for entry in data["kept"]],
                found=[Found.from_data(entry) for entry in data["found"]],
                seed=data["seed"],
                shard=data["shard"],
                versions=dict(data["versions"]),
                tried=dict(data["tried"]),
                refused=data["refused"],
                seconds=data["seconds"],
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageProblem(f"{path}: no state of a search: {error}") from None


def smallest_cover(kept: Iterable[Kept]) -> Iterator[Kept]:
    """Yield few candidates that together reach all that is new, each with what it adds.

    The next candidate is always the one that adds most to those before it.
    """
    rest = list(kept)
    reached = Branches()

    def added_count(entry: Kept) -> int:
        return len(entry.branches.without(reached))

    while rest:
        best = max(rest, key=added_count)
        added = best.branches.without(reached)
        if not len(added):
            return
        rest.remove(best)
        reached.add(added)
        yield Kept(best.candidate, added, best.functions)


def corpus_text(kept: Iterable[Kept]) -> str:
    """Return the corpus as a file of the package has it: an entry a line."""
    lines = []
    for entry in smallest_cover(kept):
        data = entry.candidate.as_data()
        data["new"] = len(entry.branches)
        data["functions"] = list(entry.functions[:_FUNCTIONS_WRITTEN])
        lines.append(json.dumps(data))
    if not lines:
        return "[]\n"
    entries = ",\n  ".join(lines)
    return f"[\n  {entries}\n]\n"


def read_corpus(path: Path) -> list[Candidate]:
    """Return the candidates of a corpus.

    Raises:
        UsageProblem: The file is another one, or cannot be read.
    """
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        return [Candidate.from_data(entry) for entry in entries]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageProblem(f"{path}: no corpus of a search: {error}") from None
