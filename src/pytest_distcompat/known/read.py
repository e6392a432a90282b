"""Reads files of known issues and turns what applies here into expectations.

A file is TOML, ``version = 1``, one ``[[issue]]`` each; ``docs/known.md`` has every key. The one that is shipped is
``issues.toml`` beside this module; an adopter's own is given with ``--distcompat-known``.
"""

from __future__ import annotations

import functools
import importlib.metadata
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement

from pytest_distcompat.driver import Driver
from pytest_distcompat.expect import Expectation, FacetValue, fails, may_fail, may_refuse, refuses
from pytest_distcompat.failures import UsageProblem

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

#: The format of the file; raised when an old reader would get a new file wrong.
FORMAT = 1

#: ``may_refuse``: where the machine decides whether it is supported; ``may_fail``: where rounding decides.
KINDS: dict[str, Callable[..., Expectation]] = {
    "fails": fails,
    "may_fail": may_fail,
    "refuses": refuses,
    "may_refuse": may_refuse,
}

_TEXTS = ("id", "link", "reason", "match", "kind", "device", "fixed_in", "script")
_NEEDED = ("id", "link", "reason", "check", "match")
_KEYS = {*_TEXTS, "check", "packages", "drivers", "cells"}


@dataclass(frozen=True)
class KnownIssue:
    """One bug of somebody else's.

    ``packages`` are requirements (``accelerate>=1.7``) that must all be installed and fit for the bug to be there.
    ``drivers`` are the libraries through which it shows: a suite is concerned whose driver names one of them. ``cells`` says
    in which cells, ``check`` by which checks, ``device`` (``cpu``, ``cuda``; empty for both) on which ranks. ``kind`` is
    one of KINDS.
    """

    id: str
    link: str
    reason: str
    check: tuple[str, ...]
    match: str
    kind: str = "fails"
    packages: tuple[str, ...] = ()
    drivers: tuple[str, ...] = ()
    cells: tuple[Mapping[str, FacetValue], ...] = ({},)
    device: str = ""
    fixed_in: str = ""
    script: str = ""
    requirements: tuple[Requirement, ...] = field(default=(), compare=False, repr=False)

    def there(self, device: str) -> bool:
        """Whether the installed versions have it, on that device."""
        return self.device in {"", device} and all(_fits(requirement) for requirement in self.requirements)

    def expectations(self) -> list[Expectation]:
        """One for each entry of ``cells``."""
        reason = f"{self.reason} ({self.link})"
        make = KINDS[self.kind]
        return [make(check, match=self.match, reason=reason, **cells) for check in self.check for cells in self.cells]


def _fits(requirement: Requirement) -> bool:
    try:
        version = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return False
    # A local build (2.13.0+cpu) and a nightly are what their number says.
    return requirement.specifier.contains(version.partition("+")[0], prereleases=True)


@functools.cache
def shipped() -> tuple[KnownIssue, ...]:
    """The issues that come with the package."""
    return read_file(Path(__file__).parent / "issues.toml")


def read_file(path: Path) -> tuple[KnownIssue, ...]:
    """All issues of a file. Raises UsageProblem, saying which entry is wrong and how."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise UsageProblem(f"known issues {path}: {error}") from error
    if data.get("version") != FORMAT:
        raise UsageProblem(
            f"known issues {path}: version is {data.get('version')!r}; this release reads version {FORMAT}"
        )
    found = tuple(_issue(entry, f"known issues {path}: issue {n}") for n, entry in enumerate(data.get("issue", []), 1))
    twice = {issue.id for issue in found if sum(other.id == issue.id for other in found) > 1}
    if twice:
        raise UsageProblem(f"known issues {path}: more than one issue has the id {min(twice)!r}")
    return found


def _issue(entry: Mapping[str, Any], where: str) -> KnownIssue:
    where += f" ({entry.get('id', 'no id')})"
    for name in _NEEDED:
        if not entry.get(name):
            raise UsageProblem(f"{where}: {name} is missing")
    wrong = sorted(set(entry) - _KEYS)
    if wrong:
        raise UsageProblem(f"{where}: no key named {wrong[0]!r}. Known: {', '.join(sorted(_KEYS))}")
    if entry.get("kind", "fails") not in KINDS:
        raise UsageProblem(f"{where}: kind {entry['kind']!r}; expected one of {', '.join(KINDS)}")
    cells = entry.get("cells", [{}])
    try:
        requirements = tuple(Requirement(text) for text in entry.get("packages", ()))
        issue = KnownIssue(
            **{name: str(entry[name]) for name in _TEXTS if name in entry},
            check=_names(entry["check"]),
            packages=tuple(entry.get("packages", ())),
            drivers=tuple(entry.get("drivers", ())),
            cells=tuple(_facets(one) for one in ([cells] if isinstance(cells, Mapping) else cells)),
            requirements=requirements,
        )
        issue.expectations()
    except (InvalidRequirement, UsageProblem) as error:
        raise UsageProblem(f"{where}: {error}") from error
    return issue


def _names(entry: str | list[str]) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else tuple(entry)


def _facets(entry: Mapping[str, Any]) -> dict[str, FacetValue]:
    """TOML has lists where an expectation has tuples."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in entry.items()}


def concerned(driver: type[Driver]) -> tuple[str, ...]:
    """What ``drivers`` of an issue may name for that driver: its libraries, and ``driver:<name>`` for itself alone."""
    return (*driver.libraries, f"driver:{driver.name}")


def applying(issues: Iterable[KnownIssue], libraries: Iterable[str], device: str) -> tuple[Expectation, ...]:
    """The expectations for a driver that stands on these libraries, with the versions that are installed."""
    named = set(libraries)
    return tuple(
        expectation
        for issue in issues
        if named & set(issue.drivers) and issue.there(device)
        for expectation in issue.expectations()
    )
