"""Reads known issues and turns what applies here into expectations.

A file is TOML, ``version = 1``, one ``[[issue]]`` each; ``docs/known.md`` has every key. The one that is shipped is
``issues.toml`` beside this module; an adopter's own is given with ``--distcompat-known``. Entries of an adopter's
``pyproject.toml`` have the same keys.
"""

from __future__ import annotations

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

#: The format of the file; raised when an old reader would get a new file wrong.
FORMAT = 1

#: ``may_refuse``: where the machine decides whether it is supported; ``may_fail``: where rounding decides.
KINDS: dict[str, Callable[..., Expectation]] = {
    "fails": fails,
    "may_fail": may_fail,
    "refuses": refuses,
    "may_refuse": may_refuse,
}

_TEXTS = ("id", "link", "reason", "match", "also", "kind", "device", "fixed_in", "script", "test")
#: In a file, which others read too.
_NEEDED = ("id", "link", "reason", "check", "match")
#: In an adopter's own pyproject.toml.
_NEEDED_AT_HOME = ("reason", "match")
_KEYS = {*_TEXTS, "check", "packages", "when", "drivers", "cells", "strict"}
_EVERY = "*"


@dataclass(frozen=True)
class KnownIssue:
    """One bug of somebody else's.

    ``packages`` are requirements (``accelerate>=1.7``) that must all be installed and fit for the bug to be there.
    ``drivers`` are the libraries through which it shows: a suite is concerned whose driver names one of them; with none
    named, every suite. ``match`` is a regular expression in what is found, ``also`` one for what the bug brings with it.
    ``cells`` says in which cells, ``check`` by which checks, ``device`` (``cpu``, ``cuda``; empty for both) on which ranks,
    ``test`` in the items whose node id contains that regular expression. ``kind`` is one of KINDS. ``strict``: whether
    each item that it covers must fail; ``where`` is the entry, for messages.
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
    strict: bool = True
    where: str = field(default="", compare=False)
    requirements: tuple[Requirement, ...] = field(default=(), compare=False, repr=False)

    def there(self, device: str) -> bool:
        """Whether the installed versions have it, on that device."""
        return not self.waits_for(device)

    def waits_for(self, device: str) -> tuple[str, ...]:
        """What keeps it from being there: requirements that do not hold here, and its device."""
        pairs = zip(self.packages, self.requirements, strict=True)
        missing = [text for text, one in pairs if not (_marked(one) and fits(one, version_of(one.name)))]
        return (*missing, *([self.device] if self.device not in {"", device} else []))

    @functools.cached_property
    def expectations(self) -> tuple[Expectation, ...]:
        """One for each check and each entry of ``cells``. Made once: every item of a suite asks all issues."""
        reason = f"{self.reason} ({self.link})" if self.link else self.reason
        make, texts = KINDS[self.kind], {"match": self.match, "reason": reason}
        if self.also and "refuse" in self.kind:
            raise UsageProblem(f"also is for what checks find; kind {self.kind!r} is told by one error")
        if self.also:
            texts["also"] = self.also
        made = [make(check, **texts, **cells) for check in self.check for cells in self.cells]
        return tuple(replace(one, strict=one.strict and self.strict) for one in made)

    def speaks_of(self, nodeid: str) -> bool:
        """Whether ``test`` leaves that item in."""
        return re.search(self.test, nodeid) is not None

    def expected_of(self, nodeid: str, cell: Cell | None) -> Expectation | None:
        """What it says of a test that is no item of a suite, None if nothing: such a test has no driver and no check."""
        if self.drivers or self.check != (_EVERY,) or not self.speaks_of(nodeid):
            return None
        for one in self.expectations:
            if one.kind == "fails" and (not one.facets or (cell is not None and one.covers(cell, _EVERY))):
                return one
        return None


@functools.cache
def shipped() -> tuple[KnownIssue, ...]:
    """The issues that come with the package."""
    return read_file(Path(__file__).parent / "issues.toml")


def read_file(path: Path) -> tuple[KnownIssue, ...]:
    """All issues of a file. Raises UsageProblem, saying which entry is wrong and how."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageProblem(f"known issues {path}: {error}") from error
    if data.get("version") != FORMAT:
        raise UsageProblem(
            f"known issues {path}: version is {data.get('version')!r}; this release reads version {FORMAT}"
        )
    wrong = sorted(set(data) - {"version", "issue"})
    if wrong:
        raise UsageProblem(f"known issues {path}: no key named {wrong[0]!r}. Known: issue, version")
    return _issues(data.get("issue", []), f"known issues {path}: issue", _NEEDED)


def read_entries(entries: Any, where: str) -> tuple[KnownIssue, ...]:
    """Issues that an adopter declares at home, ``where``: only ``reason`` and ``match`` are needed. Raises UsageProblem."""
    return _issues(entries, where, _NEEDED_AT_HOME)


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
    for name in _TEXTS:
        # A list of expressions, read as a text, would be a set of letters, which all that fails contains.
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
        issue.expectations  # noqa: B018 - making them is the check
        re.compile(issue.test)
    except (InvalidRequirement, UsageProblem) as error:
        raise UsageProblem(f"{where}: {error}") from error
    except re.error as error:
        raise UsageProblem(f"{where}: test={entry['test']!r} is no regular expression: {error}") from error
    return issue


def _strict(entry: Mapping[str, Any]) -> bool:
    """Strict unless it says otherwise, or does not say where it shows: then nothing has to fail."""
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
    """The sets of cells: one table, or a list of them. None at all would be an entry that is about nothing."""
    found = [cells] if isinstance(cells, Mapping) else cells
    if not isinstance(found, list) or not found or not all(isinstance(one, Mapping) for one in found):
        raise UsageProblem(f"cells={cells!r}: expected a table of facets, or a list of such")
    return found


def _marked(requirement: Requirement) -> bool:
    """Whether what stands behind its semicolon holds here: python_version, sys_platform."""
    return requirement.marker is None or requirement.marker.evaluate({"extra": ""})


def _facets(entry: Mapping[str, Any]) -> dict[str, FacetValue]:
    """TOML has lists where an expectation has tuples."""
    empty = [name for name, value in entry.items() if value == []]
    if empty:
        raise UsageProblem(f"cells: {empty[0]} = [] is no cell; leave it out for all")
    return {name: tuple(value) if isinstance(value, list) else value for name, value in entry.items()}


def concerned(driver: type[Driver]) -> tuple[str, ...]:
    """What ``drivers`` of an issue may name for that driver: its libraries, and ``driver:<name>`` for itself alone."""
    return (*driver.libraries, f"driver:{driver.name}")


def concerning(issues: Iterable[KnownIssue], libraries: Iterable[str], device: str) -> tuple[KnownIssue, ...]:
    """The issues for a driver that stands on these libraries, with the versions that are installed.

    What does not say where it shows comes last: it must not stand before what does.
    """
    named = set(libraries)
    found = [issue for issue in issues if (not issue.drivers or named & set(issue.drivers)) and issue.there(device)]
    return tuple(sorted(found, key=lambda issue: not (issue.strict or issue.test or issue.check != (_EVERY,))))


def applying(issues: Iterable[KnownIssue], libraries: Iterable[str], device: str) -> tuple[Expectation, ...]:
    """What they make expected of any item, but for those issues that are about some items only (``test``)."""
    return tuple(
        expectation
        for issue in concerning(issues, libraries, device)
        if issue.speaks_of("")
        for expectation in issue.expectations
    )
