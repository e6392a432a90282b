"""Reader of known issues; makes expectations of those that apply here.

A file is TOML, ``version = 1``, one ``[[issue]]`` each; ``docs/known.md`` has every key. The one that is shipped is
``issues.toml`` beside this module; an adopter's own is given with ``--distcompat-known``.
"""

from __future__ import annotations

import datetime as dt
import functools
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement

from pytest_distcompat.cell import Cell
from pytest_distcompat.driver import Driver
from pytest_distcompat.expect import Expectation, FacetValue, fails, may_fail, may_refuse, refuses
from pytest_distcompat.failures import UsageProblem
from pytest_distcompat.installed import fits, version_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

#: The format of the file; raised when an older release would misread a new file.
FORMAT = 1

#: ``may_refuse``: only some machines support it; ``may_fail``: it fails only sometimes.
KINDS: dict[str, Callable[..., Expectation]] = {make.__name__: make for make in (fails, may_fail, refuses, may_refuse)}

_TEXTS = ("id", "link", "reason", "match", "also", "kind", "device", "fixed_in", "script", "test", "until")
#: The keys that an issue needs, and those that one that is shipped needs besides, since others read it too.
_NEEDED = ("reason", "match")
_NEEDED_IF_SHIPPED = ("id", "link", "reason", "check", "match")
_KEYS = {*_TEXTS, "check", "packages", "when", "drivers", "cells", "strict"}
_EVERY = "*"


@dataclass(frozen=True)
class KnownIssue:
    """One bug in another project.

    ``packages`` are requirements (``accelerate>=1.7``) that must all be installed and fit for the bug to be there.
    ``drivers`` are the libraries that have it: it applies to suites whose driver names one of them; without any, to every
    suite. ``match`` is a regular expression for the findings, ``also`` one for further findings of the same bug.
    ``cells``, ``check``, ``device`` (``cpu``, ``cuda``; empty for both) and ``test`` (a regular expression for node ids) say
    where it occurs. ``kind`` is one of KINDS. ``strict``: whether
    each item that it covers must fail; ``until`` the last day on which it excuses; ``where`` is the entry, for messages.
    """

    id: str
    link: str
    reason: str
    check: tuple[str, ...]
    match: str
    also: str = ""
    kind: str = "fails"
    packages: tuple[str, ...] = ()
    drivers: tuple[str, ...] = ()
    cells: tuple[Mapping[str, FacetValue], ...] = ({},)
    device: str = ""
    fixed_in: str = ""
    script: str = ""
    test: str = ""
    until: str = ""
    strict: bool = True
    where: str = field(default="", compare=False)
    requirements: tuple[Requirement, ...] = field(default=(), compare=False, repr=False)

    def there(self, device: str) -> bool:
        """Tell whether the installed versions have it, on that device."""
        return not self.waits_for(device)

    @property
    def ended(self) -> bool:
        """Tell whether its last day is over."""
        return self.expectations[0].ended

    def waits_for(self, device: str) -> tuple[str, ...]:
        """Return why it does not apply here: requirements that are not met, and its device."""
        pairs = zip(self.packages, self.requirements, strict=True)
        # A marker is a condition such as python_version or sys_platform.
        missing = [
            text
            for text, one in pairs
            if (one.marker and not one.marker.evaluate({"extra": ""})) or not fits(one, version_of(one.name))
        ]
        return (*missing, *([self.device] if self.device not in {"", device} else []))

    @functools.cached_property
    def expectations(self) -> tuple[Expectation, ...]:
        """Return an expectation for each check and each entry of ``cells``; cached, since every item reads all issues."""
        reason = f"{self.reason} ({self.link})" if self.link else self.reason
        make, texts = KINDS[self.kind], {"match": self.match, "reason": reason, "until": self.until}
        if self.also and "refuse" in self.kind:
            raise UsageProblem(f"also is for what checks find; kind {self.kind!r} has one error")
        if self.also:
            texts["also"] = self.also
        made = [make(check, **texts, **cells) for check in self.check for cells in self.cells]
        return tuple(replace(one, strict=one.strict and self.strict) for one in made)

    def speaks_of(self, nodeid: str) -> bool:
        """Tell whether ``test`` matches that item."""
        return re.search(self.test, nodeid) is not None

    def expected_of(self, nodeid: str, cell: Cell | None) -> Expectation | None:
        """Return the expectation for a test that is no item of a suite, None if there is none.

        Such a test has no driver and no check.
        """
        if self.drivers or self.check != (_EVERY,) or not self.speaks_of(nodeid):
            return None
        for one in self.expectations:
            if one.kind == "fails" and (not one.facets or (cell is not None and one.covers(cell, _EVERY))):
                return one
        return None


@functools.cache
def shipped() -> tuple[KnownIssue, ...]:
    """Return the issues that come with the package."""
    return read_file(Path(__file__).parent / "issues.toml", _NEEDED_IF_SHIPPED)


def read_file(path: Path, needed: Iterable[str] = _NEEDED) -> tuple[KnownIssue, ...]:
    """Return the issues of a file, which have the ``needed`` keys. Raises UsageProblem, which names an invalid entry."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageProblem(f"known issues {path}: {error}") from error
    if data.get("version") != FORMAT:
        found = f"version is {data.get('version')!r}"
        raise UsageProblem(f"known issues {path}: {found}; this release reads version {FORMAT}")
    wrong = sorted(set(data) - {"version", "issue"})
    if wrong:
        raise UsageProblem(f"known issues {path}: no key named {wrong[0]!r}. Known: issue, version")
    return _issues(data.get("issue", []), f"known issues {path}: issue", needed)


def _issues(entries: Any, where: str, needed: Iterable[str]) -> tuple[KnownIssue, ...]:
    if not isinstance(entries, list) or not all(isinstance(entry, Mapping) for entry in entries):
        raise UsageProblem(f"{where}: expected tables, [[...]], got {entries!r}")
    found = tuple(_issue(entry, f"{where} {n}", needed) for n, entry in enumerate(entries, 1))
    ids = [issue.id for issue in found if issue.id]
    twice = {name for name in ids if ids.count(name) > 1}
    if twice:
        raise UsageProblem(f"{where.rpartition(':')[0] or where}: more than one issue has the id {min(twice)!r}")
    return found


def _issue(entry: Mapping[str, Any], where: str, needed: Iterable[str]) -> KnownIssue:
    name = entry.get("id") or ("no id" if "id" in needed else entry.get("reason", "no reason"))
    where += f" ({name})"
    for name in needed:
        if not entry.get(name):
            raise UsageProblem(f"{where}: {name} is missing")
    wrong = sorted(set(entry) - _KEYS)
    if wrong:
        raise UsageProblem(f"{where}: no key named {wrong[0]!r}. Known: {', '.join(sorted(_KEYS))}")
    if isinstance(entry.get("until"), dt.date):  # TOML has days of its own
        entry = {**entry, "until": str(entry["until"])}
    for name in _TEXTS:
        # Reject a list: as a regular expression, its text would be a character class that matches everything.
        if not isinstance(entry.get(name, ""), str):
            raise UsageProblem(f"{where}: {name}={entry[name]!r}; expected a text")
    if entry.get("device", "") not in {"", "cpu", "cuda"}:
        raise UsageProblem(f"{where}: device {entry['device']!r}; expected cpu or cuda")
    if entry.get("kind", "fails") not in KINDS:
        raise UsageProblem(f"{where}: kind {entry['kind']!r}; expected one of {', '.join(KINDS)}")
    if "when" in entry and "packages" in entry:
        raise UsageProblem(f"{where}: when and packages are one thing; give one of them")
    try:
        packages = _names(entry.get("when", entry.get("packages", ())), "when, packages")
        issue = KnownIssue(
            **{"id": "", "link": "", **{name: entry[name] for name in _TEXTS if name in entry}},
            check=_names(entry.get("check", _EVERY), "check"),
            packages=packages,
            drivers=_names(entry.get("drivers", ()), "drivers"),
            cells=tuple(_facets(one) for one in _sets(entry.get("cells", {}))),
            strict=_strict(entry),
            where=where,
            requirements=tuple(Requirement(text) for text in packages),
        )
        issue.expectations  # noqa: B018 - validates the entry
        re.compile(issue.test)
    except (InvalidRequirement, UsageProblem) as error:
        raise UsageProblem(f"{where}: {error}") from error
    except re.error as error:
        raise UsageProblem(f"{where}: test={entry['test']!r} is no regular expression: {error}") from error
    return issue


def _strict(entry: Mapping[str, Any]) -> bool:
    """Tell whether it must fail: by default if the entry names a check or a test."""
    somewhere = "check" in entry or "test" in entry
    strict = entry.get("strict", somewhere)
    if not isinstance(strict, bool):
        raise UsageProblem(f"strict={strict!r}: expected true or false")
    if strict and not somewhere:
        raise UsageProblem("strict = true says that it must fail; say where, with check or test")
    if entry.get("strict") and entry.get("kind", "").startswith("may_"):
        raise UsageProblem(f"kind {entry['kind']!r} is never strict")
    return strict


def _names(entry: Any, name: str) -> tuple[str, ...]:
    names = (entry,) if isinstance(entry, str) else tuple(entry) if isinstance(entry, (list, tuple)) else (None,)
    if not all(isinstance(one, str) for one in names):
        raise UsageProblem(f"{name}: expected a text or a list of texts, got {entry!r}")
    return names


def _sets(cells: Any) -> list[Mapping[str, Any]]:
    """Return the sets of cells, from one table or a list of them. Raises UsageProblem for an empty list."""
    found = [cells] if isinstance(cells, Mapping) else cells
    if not isinstance(found, list) or not found or not all(isinstance(one, Mapping) for one in found):
        raise UsageProblem(f"cells={cells!r}: expected a table of facets, or a list of such")
    return found


def _facets(entry: Mapping[str, Any]) -> dict[str, FacetValue]:
    """Return the facets of an expectation: TOML has lists where it has tuples."""
    empty = [name for name, value in entry.items() if value == []]
    if empty:
        raise UsageProblem(f"cells: {empty[0]} = [] is no cell; leave it out for all")
    return {name: tuple(value) if isinstance(value, list) else value for name, value in entry.items()}


def concerned(driver: type[Driver]) -> tuple[str, ...]:
    """Return the names for that driver in ``drivers`` of an issue: its libraries, and ``driver:<name>``."""
    return (*driver.libraries, f"driver:{driver.name}")


def concerning(issues: Iterable[KnownIssue], libraries: Iterable[str], device: str) -> tuple[KnownIssue, ...]:
    """Return the issues of a driver with these libraries, in the installed versions.

    Issues that name neither check nor test come last, since others are more specific.
    """
    named = set(libraries)
    found = [issue for issue in issues if (not issue.drivers or named & set(issue.drivers)) and issue.there(device)]
    return tuple(sorted(found, key=lambda issue: not (issue.strict or issue.test or issue.check != (_EVERY,))))


def applying(issues: Iterable[KnownIssue], libraries: Iterable[str], device: str) -> tuple[Expectation, ...]:
    """Return the expectations of the issues that apply to all items, without those that name a ``test``."""
    chosen = (issue for issue in concerning(issues, libraries, device) if issue.speaks_of(""))
    return tuple(expectation for issue in chosen for expectation in issue.expectations)
