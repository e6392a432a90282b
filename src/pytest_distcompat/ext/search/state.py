"""The state of a search: which candidates were tried, which were kept, and which failed.

``distcompat search`` tries *candidates*: a cell of a driver (``torch fsdp2-fp32-w2-model_mlp``),
perhaps with calls of the live trainer. It looks for branches of library code that no cell reaches.

``guide.Search`` adds each trial to the state, and ``command`` writes the state to a JSON file
(``--state``). From that file a search goes on. States of searches with other shards can be added.
A *corpus* is a smaller file, with only the candidates that reached new branches.
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

#: The version of the file's format. A file of another version is not read.
FORMAT = 1
#: The parts of a message that differ between failures of one cause: ranks, addresses, digests and
#: numbers.
_CHANCE = re.compile(r"\branks? [\d, ]+|\ball ranks|0x[0-9a-f]+|\b[0-9a-f]{16}\b|\d[\d.e+-]*")
#: The call that the message of a failed call begins with: ``export(max_shard_size=7)``.
_ARGUMENTS = re.compile(r"^(\w+)\([^)]*\)")
#: How many functions of an entry are written to a corpus: those with most new branches.
_FUNCTIONS_WRITTEN = 3


#: An object in a JSON file.
_Data = dict[str, Any]


@dataclass
class Kept:
    """A candidate that reached new branches.

    Attributes:
        candidate: The candidate.
        branches: The branches that it was the first to reach.
        functions: The functions with most of these branches, and how many each has:
            ``torchao/optim/adam.py _AdamBase.step: 11``.
        barren: How many of its neighbours (candidates that differ from it in one thing) have
            reached nothing new, since one last did.
    """

    candidate: Candidate
    branches: Branches
    functions: tuple[str, ...] = ()
    barren: int = 0

    def as_data(self) -> _Data:
        """Return it as data for the JSON file of a state."""
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
    """A finding: one way in which candidates fail.

    A candidate is judged by a law that needs no expected values (``trial``): its checks pass, its
    calls have the effect that they have in one process, or the libraries refuse it with a message.

    Attributes:
        candidate: The first candidate that failed so, reduced to the parts that it needs to fail.
        problem: How it fails: the check or call, and the first line of the message.
        times: How many candidates failed so.
    """

    candidate: Candidate
    problem: str
    times: int = 1

    @property
    def cause(self) -> str:
        """Return ``problem`` without what differs between failures of one cause."""
        return cause_of(self.problem)

    def as_data(self) -> _Data:
        """Return it as data for the JSON file of a state."""
        return {**self.candidate.as_data(), "problem": self.problem, "times": self.times}

    @classmethod
    def from_data(cls, data: _Data) -> Found:
        """Return what ``as_data`` wrote."""
        return cls(Candidate.from_data(data), data["problem"], data["times"])


def cause_of(problem: str) -> str:
    """Return a problem without what differs between failures of one cause.

    Arguments of the call at its beginning, ranks and numbers are removed. Failures with equal
    results count as one.
    """
    without_arguments = _ARGUMENTS.sub(r"\1()", problem)
    return _CHANCE.sub("", without_arguments)


@dataclass
class State:
    """What a search knows.

    Attributes:
        seed: The seed of its random numbers.
        shard: Which of several searches it is, that draw differently: ``1/2``.
        versions: Library -> installed release.
        tried: Candidate as text -> how many branches it was the first to reach, in the order in
            which they were tried.
        refused: How many of them the stack (torch and the libraries above it) refused with an
            exception raised on purpose.
        seconds: How long all trials took.
        kept: The candidates that reached new branches.
        found: The findings, one for each way to fail.
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
        """Return all new branches that its candidates have reached."""
        branches = Branches()
        for kept in self.kept:
            branches.add(kept.branches)
        return branches

    def yields(self, readers: Mapping[str, int]) -> Yields:
        """Return what the candidates tried so far have yielded, by option, setting and call.

        A candidate yields the branches that it is the first to reach.

        Args:
            readers: Name of a setting's field, ``eps`` -> how many unreached branches read it.
        """
        yields = Yields(readers)
        new_by_text: dict[str, int] = {}
        for kept in self.kept:
            new_by_text[str(kept.candidate)] = len(kept.branches)
        for text in self.tried:
            yields.add(Candidate.parse(text), new_by_text.get(text, 0))
        return yields

    def add(self, other: State) -> None:
        """Add what another search knows, such as one of another shard."""
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
        """Write it to a JSON file. The file is complete at any moment, also if this is killed."""
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
            UsageProblem: The file is no state of this format, or cannot be read.
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
    """Yield few candidates that together reach all new branches, each with those that it adds.

    The next candidate is always the one that adds most branches to those before it. So the number
    is small, but not always the smallest.
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
    """Return the text of a corpus file, JSON with one entry a line, like ``corpus.json``."""
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
    """Return the candidates of a corpus file.

    Raises:
        UsageProblem: The file is no corpus, or cannot be read.
    """
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        return [Candidate.from_data(entry) for entry in entries]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageProblem(f"{path}: no corpus of a search: {error}") from None
