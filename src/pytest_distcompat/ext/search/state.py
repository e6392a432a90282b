"""The state of a search: what was tried, kept and found, in a file from which it goes on, and which others can be added to."""

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


def cause_of(problem: str) -> str:
    """Return a problem without what differs between failures of one cause."""
    return _CHANCE.sub("", _ARGUMENTS.sub(r"\1()", problem))


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
        """Return what was new by far; ``readers`` as for ``Yields``."""
        yields = Yields(readers)
        new_by_text = {str(kept.candidate): len(kept.branches) for kept in self.kept}
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
        for found in other.found:
            same = self.finding(found.cause)
            if same is None:
                self.found.append(found)
            else:
                same.times += found.times

    def finding(self, cause: str) -> Found | None:
        """Return what was found to fail so; None if nothing was."""
        for found in self.found:
            if found.cause == cause:
                return found
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
            "kept": [
                {
                    **kept.candidate.as_data(),
                    "functions": list(kept.functions),
                    "barren": kept.barren,
                    "branches": kept.branches.as_data(),
                }
                for kept in self.kept
            ],
            "found": [
                {**found.candidate.as_data(), "problem": found.problem, "times": found.times}
                for found in self.found
            ],
        }
        partial = path.with_name(f"{path.name}.part")
        partial.write_text(json.dumps(data), encoding="utf-8")
        partial.replace(path)

    @classmethod
    def read(cls, path: Path) -> State:
        """Return what ``write`` wrote. Raises UsageProblem for another file."""
        try:
            data: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            if data["format"] != FORMAT:
                raise UsageProblem(
                    f"{path}: expected a state of format {FORMAT}, found {data['format']}"
                )
            kept = [
                Kept(
                    Candidate.from_data(entry),
                    Branches.from_data(entry["branches"]),
                    tuple(entry["functions"]),
                    entry["barren"],
                )
                for entry in data["kept"]
            ]
            found = [
                Found(Candidate.from_data(entry), entry["problem"], entry["times"])
                for entry in data["found"]
            ]
            return cls(
                data["seed"],
                data["shard"],
                dict(data["versions"]),
                dict(data["tried"]),
                data["refused"],
                data["seconds"],
                kept,
                found,
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageProblem(f"{path}: no state of a search: {error}") from None


def smallest_cover(kept: Iterable[Kept]) -> Iterator[Kept]:
    """Yield as few candidates as reach all that is new, by the rule that the next one adds most; each with what it adds."""
    rest = list(kept)
    seen = Branches()
    while rest:
        best = max(rest, key=lambda entry: len(entry.branches.without(seen)))
        added = best.branches.without(seen)
        if not len(added):
            return
        rest.remove(best)
        seen.add(added)
        yield Kept(best.candidate, added, best.functions)


def corpus_text(kept: Iterable[Kept]) -> str:
    """Return the corpus as a file of the package has it: an entry a line."""
    lines = []
    for entry in smallest_cover(kept):
        data = entry.candidate.as_data()
        data["new"] = len(entry.branches)
        data["functions"] = list(entry.functions[:_FUNCTIONS_WRITTEN])
        lines.append(json.dumps(data))
    return "[\n  " + ",\n  ".join(lines) + "\n]\n" if lines else "[]\n"


def read_corpus(path: Path) -> list[Candidate]:
    """Return the candidates of a corpus. Raises UsageProblem for another file."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        return [Candidate.from_data(entry) for entry in entries]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageProblem(f"{path}: no corpus of a search: {error}") from None
