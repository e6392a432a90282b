"""Keys of a file that differ from the model's own names in one part: a prefix or a segment that is extra, or missing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from pytest_distcompat.strategies import STRATEGIES
from pytest_distcompat.strategies._base import OPTION_WRAPPERS


@dataclass(frozen=True)
class Part:
    """What is extra in a key, or missing: ``_orig_mod.`` in front, or one segment anywhere in it."""

    text: str
    kind: str
    extra: bool

    def __str__(self) -> str:
        """Return the words for it in a finding: what keys do that have it, or lack it."""
        return f"{'have the extra' if self.extra else 'lack the'} {self.kind} `{self.text}`"

    @property
    def of_a_library(self) -> bool:
        """Tell whether no wrapper of torch or of a strategy puts it in or takes it out: a library may, when it saves."""
        wrappers = set(OPTION_WRAPPERS.values())
        for strategy in map(STRATEGIES.get, STRATEGIES.names()):
            wrappers.update(strategy.wrappers, strategy.leading)
        return not self.extra or wrappers.isdisjoint(self.text.split("."))


@dataclass(frozen=True)
class Renamed:
    """Several keys with the same part that is extra or missing; ``names`` has the model's own name for each of them."""

    part: Part
    names: dict[str, str]

    def __str__(self) -> str:
        """Return how the keys differ, and the way out if a library may have renamed them."""
        return f"{len(self.names)} keys {self.part}"

    @property
    def way_out(self) -> str:
        """Return what to do if a library may have renamed the keys; an empty text if a wrapper did."""
        return "; if a library renames them and loads them so, say it by saved_name" if self.part.of_a_library else ""


def renamed(keys: Collection[str], known: Collection[str]) -> list[Renamed]:
    """Return the groups of two or more keys that differ from known names in the same part."""
    groups: dict[Part, dict[str, str]] = defaultdict(dict)
    lacking = _by_what_is_left(known)
    for key in sorted(keys):
        for part, name in (*_extra(key, known), *lacking.get(key, ())):
            groups[part][key] = name
    found: list[Renamed] = []
    left = set(keys)
    # A key that could be in two groups belongs to the larger one.
    for part, names in sorted(groups.items(), key=lambda group: len(group[1]), reverse=True):
        rest = {key: name for key, name in names.items() if key in left}
        if len(rest) > 1:
            found.append(Renamed(part, rest))
            left -= rest.keys()
    return found


def _extra(key: str, known: Collection[str]) -> Iterator[tuple[Part, str]]:
    """Yield each part without which the key is a known name, with that name; the shortest prefix first."""
    segments = key.split(".")
    for count in range(1, len(segments)):
        name = ".".join(segments[count:])
        if name in known:
            yield Part(f"{'.'.join(segments[:count])}.", "prefix", extra=True), name
            return
    for segment in dict.fromkeys(segments):
        name = _without(segments, segment)
        if name in known:
            yield Part(f"{segment}.", "segment", extra=True), name
            return


def _by_what_is_left(known: Collection[str]) -> dict[str, list[tuple[Part, str]]]:
    """Return what each known name is without a part, with that part and the name."""
    prefixes: dict[str, list[tuple[Part, str]]] = defaultdict(list)
    left: dict[str, list[tuple[Part, str]]] = defaultdict(list)
    for name in sorted(known):
        segments = name.split(".")
        for count in range(1, len(segments)):
            part = Part(f"{'.'.join(segments[:count])}.", "prefix", extra=False)
            prefixes[".".join(segments[count:])].append((part, name))
        for segment in dict.fromkeys(segments[1:-1]):
            left[_without(segments, segment)].append((Part(f"{segment}.", "segment", extra=False), name))
    for key, found in prefixes.items():
        # The end of several names, such as "weight", says nothing.
        if len(found) == 1:
            left[key] += found
    return left


def _without(segments: list[str], segment: str) -> str:
    """Return the name without that segment, wherever it stands; of a number, which counts modules, nothing is left out."""
    if segment.isdecimal():
        return ""
    return ".".join(one for one in segments if one != segment)
