"""Keys of a file that differ from the model's own names in one prefix or segment."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from pytest_distcompat.strategies import OPTION_WRAPPERS, STRATEGIES


@dataclass(frozen=True)
class Part:
    """Part of a key that is extra in it, or missing: a prefix or one segment anywhere.

    ``_orig_mod.`` in front of a key is a prefix.

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
        """Tell whether the part may be a library's, which puts it in or takes it out as it saves.

        It is then in no wrapper of torch or of a strategy.
        """
        if not self.extra:
            return True
        wrappers = set(OPTION_WRAPPERS.values())
        for name in STRATEGIES.names():
            strategy = STRATEGIES.get(name)
            wrappers.update(strategy.wrappers, strategy.leading)
        return wrappers.isdisjoint(self.text.split("."))


@dataclass(frozen=True)
class Renamed:
    """Several keys with the same part that is extra or missing.

    Attributes:
        part: The part in which they differ from the model's own names.
        names: The model's own name for each of the keys.
    """

    part: Part
    names: dict[str, str]

    def __str__(self) -> str:
        """Return how many keys differ, and how."""
        return f"{len(self.names)} keys {self.part}"

    @property
    def way_out(self) -> str:
        """Return what to do if a library may have renamed the keys.

        An empty text if a wrapper did.
        """
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
    """Yield the known name that the key is without a prefix, or else without a segment.

    Of several prefixes it is the shortest one that leaves a known name.
    """
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
    """Return the known names that a shortened name may be short for.

    The keys are the known names without one of their segments or prefixes.
    """
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
    """Return the name without that segment, wherever it stands.

    An empty text for a segment that is a number: it counts modules.
    """
    if segment.isdecimal():
        return ""
    return ".".join(other for other in segments if other != segment)
