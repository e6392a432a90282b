"""Keys of a file that differ from the model's own names in one part.

The part is a prefix or a segment, which is extra in the key, or missing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from pytest_distcompat.strategies import OPTION_WRAPPERS, STRATEGIES


@dataclass(frozen=True)
class Part:
    """A prefix or a segment of a key that is extra in it, or missing.

    A prefix stands in front of a key, as ``_orig_mod.`` does, a segment anywhere in it.

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
        """Tell whether a library may put the part in, or take it out, when it saves.

        It may where no wrapper of torch or of a strategy does.
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
        part: The part.
        names: The model's own name for each key.
    """

    part: Part
    names: dict[str, str]

    def __str__(self) -> str:
        """Return how many keys differ, and how."""
        return f"{len(self.names)} keys {self.part}"

    @property
    def way_out(self) -> str:
        """Return what to do if a library may have renamed the keys.

        The text is empty if a wrapper renamed them.
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
        candidates = list(_candidates_without_extra(key, known))
        candidates += candidates_that_lack.get(key, [])
        for candidate in candidates:
            names_by_part[candidate.part][key] = candidate.name

    def keys_with(part: Part) -> int:
        return len(names_by_part[part])

    groups: list[Renamed] = []
    ungrouped = set(keys)
    # A key that could be in two groups belongs to the larger one.
    for part in sorted(names_by_part, key=keys_with, reverse=True):
        members: dict[str, str] = {}
        for key, name in names_by_part[part].items():
            if key not in ungrouped:
                continue
            members[key] = name
        if len(members) > 1:
            groups.append(Renamed(part, members))
            ungrouped -= members.keys()
    return groups


def _candidates_without_extra(key: str, known: Collection[str]) -> Iterator[_Candidate]:
    """Yield the known name that the key is without a prefix, or else without a segment.

    Of several prefixes that fit it is the shortest, of several segments the first.
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
    """Return, for each shortened name, the known names that it may be short for.

    A shortened name is a known one without one of its segments, or without a prefix.
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

    The name is empty if the segment is a number, which counts modules.
    """
    if segment.isdecimal():
        return ""
    others: list[str] = []
    for other in segments:
        if other != segment:
            others.append(other)
    return ".".join(others)
