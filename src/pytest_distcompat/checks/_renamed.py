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
        if self.extra:
            return f"have the extra {self.kind} `{self.text}`"
        return f"lack the {self.kind} `{self.text}`"

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
    names_by_part: dict[Part, dict[str, str]] = {}
    for key in sorted(keys):
        candidates = [*_candidates_without_extra(key, known)]
        candidates += candidates_that_lack.get(key, ())
        for candidate in candidates:
            names = names_by_part.setdefault(candidate.part, {})
            names[key] = candidate.name
    possible_groups = [Renamed(part, names) for part, names in names_by_part.items()]
    # A key that could be in two groups belongs to the larger one.
    possible_groups.sort(key=_size, reverse=True)
    groups: list[Renamed] = []
    grouped: set[str] = set()
    for group in possible_groups:
        members: dict[str, str] = {}
        for key, name in group.names.items():
            if key in grouped:
                continue
            members[key] = name
        if len(members) > 1:
            groups.append(Renamed(group.part, members))
            grouped.update(members)
    return groups


def _size(group: Renamed) -> int:
    """Return the number of keys in a group."""
    return len(group.names)


def _candidates_without_extra(key: str, known: Collection[str]) -> Iterator[_Candidate]:
    """Yield the known name that the key is without a prefix, or else without a segment.

    Of several prefixes it is the shortest one that leaves a known name.
    """
    segments = key.split(".")
    for count in range(1, len(segments)):
        name = ".".join(segments[count:])
        if name in known:
            prefix = _prefix(segments[:count], extra=True)
            yield _Candidate(prefix, name)
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
            prefix = _prefix(segments[:count], extra=False)
            without_prefix[shortened].append(_Candidate(prefix, name))
        for segment in dict.fromkeys(segments[1:-1]):
            shortened = _without(segments, segment)
            part = _segment(segment, extra=False)
            without_segment[shortened].append(_Candidate(part, name))
    for shortened, candidates in without_prefix.items():
        # The end of several names, such as "weight", says nothing.
        if len(candidates) == 1:
            without_segment[shortened] += candidates
    return without_segment


def _prefix(segments: list[str], *, extra: bool) -> Part:
    text = ".".join(segments)
    return Part(f"{text}.", "prefix", extra)


def _segment(segment: str, *, extra: bool) -> Part:
    return Part(f"{segment}.", "segment", extra)


def _without(segments: list[str], segment: str) -> str:
    """Return the name without that segment, wherever it stands.

    An empty text for a segment that is a number: it counts modules.
    """
    if segment.isdecimal():
        return ""
    others = []
    for other in segments:
        if other != segment:
            others.append(other)
    return ".".join(others)
