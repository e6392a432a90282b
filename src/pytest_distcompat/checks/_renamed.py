"""Groups of wrong keys that differ from a model's own names in the same prefix or segment.

The checks ``names`` and ``export`` call ``renamed`` with the keys of a saved file that are no names
of the model. If 100 keys all begin with ``_orig_mod.``, one finding then says so in place of 100:
``100 keys have the extra prefix `_orig_mod.```.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from pytest_distcompat.strategies import OPTION_WRAPPERS, STRATEGIES


@dataclass(frozen=True)
class Part:
    """What a key has in addition to a model's own name, or lacks of it.

    A prefix is one or more segments in front. A segment is between two dots and may be repeated:
    ``_checkpoint_wrapped_module.`` in ``layers.0._checkpoint_wrapped_module.mlp.weight``.

    Attributes:
        text: The part, with the dot after it: ``_orig_mod.``.
        kind: ``prefix`` or ``segment``.
        extra: True if the key has the part and the model's own name does not. False if the name has
            it and the key does not.
    """

    text: str
    kind: str
    extra: bool

    def __str__(self) -> str:
        """Return the words that follow "9 keys": ``have the extra prefix `_orig_mod.```."""
        if self.extra:
            return f"have the extra {self.kind} `{self.text}`"
        return f"lack the {self.kind} `{self.text}`"

    @property
    def of_a_library(self) -> bool:
        """Tell whether a library may add or remove the part on purpose when it saves.

        A part that a wrapper puts in, such as ``module.`` of DDP, is no library's: it is a bug.
        """
        if not self.extra:
            return True
        # The segments that an option (``_orig_mod``) or a strategy puts into names, a strategy in
        # front (``leading``) or anywhere (``wrappers``).
        wrappers = set(OPTION_WRAPPERS.values())
        for name in STRATEGIES.names():
            strategy = STRATEGIES.get(name)
            wrappers.update(strategy.wrappers, strategy.leading)
        return wrappers.isdisjoint(self.text.split("."))


@dataclass(frozen=True)
class Renamed:
    """Several keys that differ from the model's own names in the same part.

    Attributes:
        part: That part.
        names: Key -> the model's own name that it stands for.
    """

    part: Part
    names: dict[str, str]

    def __str__(self) -> str:
        """Return how many keys differ, and how."""
        return f"{len(self.names)} keys {self.part}"

    @property
    def way_out(self) -> str:
        """Return the advice for keys that a library may have renamed; empty if a wrapper did."""
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
    # Keys may lack a part of a name, or have one more.
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
        # One key alone shows no pattern.
        if len(members) > 1:
            groups.append(Renamed(group.part, members))
            grouped.update(members)
    return groups


def _size(group: Renamed) -> int:
    """Return the number of keys in a group."""
    return len(group.names)


def _candidates_without_extra(key: str, known: Collection[str]) -> Iterator[_Candidate]:
    """Yield the known name that remains of the key without a prefix, or without a segment.

    There is at most one. The shortest prefix that leaves a known name is tried before segments.
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
    """Return shortened name -> the known names that it may stand for.

    A shortened name is a known name without one of its prefixes or segments.
    """
    candidates_by_name: dict[str, list[_Candidate]] = defaultdict(list)
    without_prefix: dict[str, list[_Candidate]] = defaultdict(list)
    for name in sorted(known):
        segments = name.split(".")
        for count in range(1, len(segments)):
            shortened = ".".join(segments[count:])
            prefix = _prefix(segments[:count], extra=False)
            without_prefix[shortened].append(_Candidate(prefix, name))
        # Without its first segment a name lacks a prefix, see above. The last one is never missing.
        for segment in dict.fromkeys(segments[1:-1]):
            shortened = _without(segments, segment)
            part = _segment(segment, extra=False)
            candidates_by_name[shortened].append(_Candidate(part, name))
    for shortened, candidates in without_prefix.items():
        # The end of several names, such as "weight", says nothing.
        if len(candidates) == 1:
            candidates_by_name[shortened] += candidates
    return candidates_by_name


def _prefix(segments: list[str], *, extra: bool) -> Part:
    """Return the prefix of these segments: ``_orig_mod.module.`` of two."""
    text = ".".join(segments)
    return Part(f"{text}.", "prefix", extra)


def _segment(segment: str, *, extra: bool) -> Part:
    """Return the part that is this segment, wherever it stands in a key."""
    return Part(f"{segment}.", "segment", extra)


def _without(segments: list[str], segment: str) -> str:
    """Return the name without that segment, however often it has it.

    The result is empty, which is no known name, for a number as in ``layers.0``: it tells modules
    of a list apart, and no wrapper adds it.
    """
    if segment.isdecimal():
        return ""
    others = []
    for other in segments:
        if other != segment:
            others.append(other)
    return ".".join(others)
