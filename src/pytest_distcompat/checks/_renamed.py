"""Keys of a file that differ from the model's own names in one part: a prefix or a segment that is extra, or missing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from pytest_distcompat.strategies import OPTION_WRAPPERS, STRATEGIES


@dataclass(frozen=True)
class Part:
    """A prefix (``_orig_mod.`` in front of a key) or one segment anywhere in it, that is extra in the key or missing.

    Attributes:
        text: The part, with the dot after it.
        kind: ``prefix`` or ``segment``.
        extra: Whether the key has it and the model's own name does not; else it is the other way
            round.
    """

    text: str
    kind: str
    extra: bool

    def __str__(self) -> str:
        """Return the words for it in a finding: what keys do that have it, or lack it."""
        verb = "have the extra" if self.extra else "lack the"
        return f"{verb} {self.kind} `{self.text}`"

    @property
    def of_a_library(self) -> bool:
        """Tell whether no wrapper of torch or of a strategy puts it in or takes it out: a library may, when it saves."""
        if not self.extra:
            return True
        wrappers = set(OPTION_WRAPPERS.values())
        for name in STRATEGIES.names():
            strategy = STRATEGIES.get(name)
            wrappers.update(strategy.wrappers, strategy.leading)
        return wrappers.isdisjoint(self.text.split("."))


@dataclass(frozen=True)
class Renamed:
    """Several keys with the same part that is extra or missing; ``names`` has the model's own name for each of them."""

    part: Part
    names: dict[str, str]

    def __str__(self) -> str:
        """Return how many keys differ, and how."""
        return f"{len(self.names)} keys {self.part}"

    @property
    def way_out(self) -> str:
        """Return what to do if a library may have renamed the keys; an empty text if a wrapper did."""
        if self.part.of_a_library:
            return "; if a library renames them and loads them so, say it by saved_name"
        return ""


@dataclass(frozen=True)
class _Candidate:
    """A model's own name that a key may stand for, and the part in which they differ."""

    part: Part
    name: str


def renamed(keys: Collection[str], known: Collection[str]) -> list[Renamed]:
    """Return the groups of two or more keys that differ from known names in the same part.

    Args:
        keys: Keys that are no names of the model.
        known: The model's own names.
    """
    candidates_that_lack = _candidates_by_shortened_name(known)
    names_by_part: dict[Part, dict[str, str]] = defaultdict(dict)
    for key in sorted(keys):
        for candidate in (
            *_candidates_without_extra(key, known),
            *candidates_that_lack.get(key, ()),
        ):
            names_by_part[candidate.part][key] = candidate.name
    # A key that could be in two groups belongs to the larger one.
    largest_first = sorted(names_by_part.items(), key=lambda item: len(item[1]), reverse=True)
    groups: list[Renamed] = []
    ungrouped = set(keys)
    for part, names in largest_first:
        members = {key: name for key, name in names.items() if key in ungrouped}
        if len(members) > 1:
            groups.append(Renamed(part, members))
            ungrouped -= members.keys()
    return groups


def _candidates_without_extra(key: str, known: Collection[str]) -> Iterator[_Candidate]:
    """Yield the known name that the key is without a prefix, the shortest that fits; or else without a segment."""
    segments = key.split(".")
    for count in range(1, len(segments)):
        name = ".".join(segments[count:])
        if name in known:
            yield _Candidate(_prefix(segments[:count], extra=True), name)
            return
    for segment in dict.fromkeys(segments):
        name = _without(segments, segment)
        if name in known:
            yield _Candidate(_segment(segment, extra=True), name)
            return


def _candidates_by_shortened_name(known: Collection[str]) -> dict[str, list[_Candidate]]:
    """Return, for each known name without one of its segments or prefixes, the names that it may be short for."""
    without_segment: dict[str, list[_Candidate]] = defaultdict(list)
    without_prefix: dict[str, list[_Candidate]] = defaultdict(list)
    for name in sorted(known):
        segments = name.split(".")
        for count in range(1, len(segments)):
            shortened = ".".join(segments[count:])
            without_prefix[shortened].append(
                _Candidate(_prefix(segments[:count], extra=False), name)
            )
        for segment in dict.fromkeys(segments[1:-1]):
            shortened = _without(segments, segment)
            without_segment[shortened].append(_Candidate(_segment(segment, extra=False), name))
    for shortened, candidates in without_prefix.items():
        # The end of several names, such as "weight", says nothing.
        if len(candidates) == 1:
            without_segment[shortened] += candidates
    return without_segment


def _prefix(segments: list[str], *, extra: bool) -> Part:
    return Part(f"{'.'.join(segments)}.", "prefix", extra)


def _segment(segment: str, *, extra: bool) -> Part:
    return Part(f"{segment}.", "segment", extra)


def _without(segments: list[str], segment: str) -> str:
    """Return the name without that segment, wherever it stands; an empty text for a number, which counts modules."""
    if segment.isdecimal():
        return ""
    return ".".join(other for other in segments if other != segment)
