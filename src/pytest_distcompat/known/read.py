"""Known issues: bugs of other projects, for which a failure is expected where they are installed.

They are read from TOML files with ``version = 1`` and an ``[[issue]]`` for each; ``docs/known.md``
has all keys. Extensions ship some files (entry point ``pytest_distcompat.known_issues``); users add
files with ``--distcompat-known``.
"""

from __future__ import annotations

import datetime as dt
import functools
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement

from pytest_distcompat.cell import Cell
from pytest_distcompat.driver import Driver
from pytest_distcompat.expect import Expectation, FacetValue, fails, may_fail, may_refuse, refuses
from pytest_distcompat.failures import UsageProblem
from pytest_distcompat.installed import fits, version_of
from pytest_distcompat.registry import Registry

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

#: The format of the file; raised when an older release would misread a new file.
FORMAT = 1

#: The kinds of expectations. ``may_refuse`` is for what only some machines support, ``may_fail``
#: for what fails only sometimes.
KINDS: dict[str, Callable[..., Expectation]] = {
    "fails": fails,
    "may_fail": may_fail,
    "refuses": refuses,
    "may_refuse": may_refuse,
}

#: The keys whose value is a text.
_TEXTS = (
    "id",
    "link",
    "reason",
    "match",
    "also",
    "kind",
    "device",
    "fixed_in",
    "script",
    "test",
    "until",
)
#: The keys that an issue of a user's own file needs, and those of an issue that is shipped to
#: others.
_NEEDED = ("reason", "match")
_NEEDED_IF_SHIPPED = ("id", "link", "reason", "check", "match")
_KEYS = {*_TEXTS, "check", "packages", "when", "drivers", "cells", "strict"}
#: Stands for all checks.
_EVERY = "*"


@dataclass(frozen=True)
class KnownIssue:
    """A bug in another project, and where it shows.

    Attributes:
        id: A name for the issue.
        link: The bug report.
        reason: What is wrong, in a sentence.
        check: The names of the checks that fail; ``*`` for all.
        match: A regular expression that the findings must match.
        also: A second one, for further findings of the same bug.
        kind: What is expected, a key of ``KINDS``.
        packages: Requirements such as ``accelerate>=1.7``. The bug is present if all of them are
            met.
        drivers: The libraries with the bug. The issue applies to suites whose driver uses one of
            them; empty for all suites.
        cells: The cells in which the bug shows: each mapping is of facets and their values.
        device: ``cpu`` or ``cuda``; empty for both.
        fixed_in: The release that fixes the bug.
        script: A file that reproduces the bug without this plugin.
        test: A regular expression for the node ids of the tests in which the bug shows.
        until: The last day on which a failure is expected.
        strict: Whether each test that the issue covers must fail.
        where: The place of the entry in its file, for messages.
        requirements: ``packages``, parsed.
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
    requirements: tuple[Requirement, ...] = field(
        default=(),
        compare=False,
        repr=False,
    )

    def applies_on(self, device: str) -> bool:
        """Tell whether the installed packages have the bug on this device."""
        return not self.missing_requirements(device)

    @property
    def ended(self) -> bool:
        """Tell whether the day ``until`` is over."""
        return self.expectations[0].ended

    def missing_requirements(self, device: str) -> tuple[str, ...]:
        """Return why the issue does not apply: unmet requirements, and its device."""
        missing: list[str] = []
        for text, requirement in zip(self.packages, self.requirements, strict=True):
            if not _is_met(requirement):
                missing.append(text)
        if self.device not in {"", device}:
            missing.append(self.device)
        return tuple(missing)

    @functools.cached_property
    def expectations(self) -> tuple[Expectation, ...]:
        """An expectation for each check and each entry of ``cells``."""
        # Cached, because every test item reads all issues.
        if self.also and "refuse" in self.kind:
            raise UsageProblem(f"also is for what checks find; kind {self.kind!r} has one error")
        reason = self.reason
        if self.link:
            reason = f"{reason} ({self.link})"
        texts = {"match": self.match, "reason": reason, "until": self.until}
        if self.also:
            texts["also"] = self.also
        make = KINDS[self.kind]
        expectations = []
        for check in self.check:
            for facets in self.cells:
                expectation = make(check, **texts, **facets)
                if not self.strict:
                    expectation = replace(expectation, strict=False)
                expectations.append(expectation)
        return tuple(expectations)

    def matches_test(self, nodeid: str) -> bool:
        """Tell whether ``test`` matches a node id; without a ``test`` the issue matches all."""
        return re.search(self.test, nodeid) is not None

    def expectation_for(self, nodeid: str, cell: Cell | None) -> Expectation | None:
        """Return the expectation for a marked test, None if the issue does not cover it.

        A marked test has no driver and no check, so an issue that names one of these does not cover
        it.
        """
        if self.drivers or self.check != (_EVERY,) or not self.matches_test(nodeid):
            return None
        for expectation in self.expectations:
            if expectation.kind != "fails":
                continue
            if not expectation.facets:
                return expectation
            if cell is not None and expectation.covers(cell, _EVERY):
                return expectation
        return None


def _is_met(requirement: Requirement) -> bool:
    """Tell whether the installed version meets the requirement, and its marker is true here."""
    # A marker is a condition such as python_version < "3.12".
    if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
        return False
    return fits(requirement, version_of(requirement.name))


@dataclass(frozen=True)
class IssueFile:
    """A file of issues that an extension ships, under a name of its own."""

    name: str
    path: Path


#: The files that extensions ship.
ISSUE_FILES: Registry[IssueFile] = Registry(
    "pytest_distcompat.known_issues", IssueFile, "file of known issues", has_modules=False
)


@functools.cache
def shipped() -> tuple[KnownIssue, ...]:
    """Return the issues of all files that extensions ship."""
    issues: list[KnownIssue] = []
    for file in ISSUE_FILES.by_name.values():
        issues += read_file(file.path, _NEEDED_IF_SHIPPED)
    return tuple(issues)


def read_file(path: Path, needed: Iterable[str] = _NEEDED) -> tuple[KnownIssue, ...]:
    """Return the issues of a file.

    Args:
        path: The TOML file.
        needed: The keys that each issue must have.

    Raises:
        UsageProblem: If the file or an entry is invalid; the message names the entry.
    """
    where = f"known issues {path}"
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageProblem(f"{where}: {error}") from error
    version = data.get("version")
    if version != FORMAT:
        raise UsageProblem(f"{where}: version is {version!r}; this release reads version {FORMAT}")
    unknown = sorted(set(data) - {"version", "issue"})
    if unknown:
        raise UsageProblem(f"{where}: no key named {unknown[0]!r}. Known: issue, version")
    return _issues(data.get("issue", []), f"{where}: issue", needed)


def _issues(entries: Any, where: str, needed: Iterable[str]) -> tuple[KnownIssue, ...]:
    """Return the issues of all entries. Raises UsageProblem for an invalid one or a double id."""
    if not _is_list_of(entries, Mapping):
        raise UsageProblem(f"{where}: expected tables, [[...]], got {entries!r}")
    issues: list[KnownIssue] = []
    for number, entry in enumerate(entries, 1):
        issues.append(_issue(entry, f"{where} {number}", needed))
    duplicates = _ids_of_several(issues)
    if duplicates:
        file = where.rpartition(":")[0] or where
        raise UsageProblem(f"{file}: more than one issue has the id {min(duplicates)!r}")
    return tuple(issues)


def _is_list_of(value: Any, item_type: type) -> bool:
    """Tell whether a value is a list with items of that type alone."""
    return isinstance(value, list) and _is_sequence_of(value, item_type)


def _is_sequence_of(value: Any, item_type: type) -> bool:
    """Tell whether a value is a list or a tuple with items of that type alone."""
    if not isinstance(value, (list, tuple)):
        return False
    return all(isinstance(item, item_type) for item in value)


def _ids_of_several(issues: Iterable[KnownIssue]) -> list[str]:
    """Return the ids that more than one issue has."""
    ids: set[str] = set()
    duplicates: list[str] = []
    for issue in issues:
        if issue.id and issue.id in ids:
            duplicates.append(issue.id)
        ids.add(issue.id)
    return duplicates


def _issue(entry: Mapping[str, Any], where: str, needed: Iterable[str]) -> KnownIssue:
    """Return the issue of an entry. Raises UsageProblem, which begins with ``where``."""
    where = f"{where} ({_title(entry, needed)})"
    if isinstance(entry.get("until"), dt.date):
        # TOML has a type for dates.
        entry = {**entry, "until": str(entry["until"])}
    for problem in _problems(entry, needed):
        raise UsageProblem(f"{where}: {problem}")
    try:
        issue = _parsed(entry, where)
        issue.expectations  # noqa: B018 - validates the entry
        re.compile(issue.test)
    except (InvalidRequirement, UsageProblem) as error:
        raise UsageProblem(f"{where}: {error}") from error
    except re.error as error:
        raise UsageProblem(
            f"{where}: test={entry['test']!r} is no regular expression: {error}"
        ) from error
    return issue


def _title(entry: Mapping[str, Any], needed: Iterable[str]) -> Any:
    """Return how messages call an entry: by its id, or by its reason if an id is not required."""
    if entry.get("id"):
        return entry["id"]
    if "id" in needed:
        return "no id"
    return entry.get("reason", "no reason")


def _problems(entry: Mapping[str, Any], needed: Iterable[str]) -> Iterator[str]:
    """Yield what is wrong with the keys of an entry and with their values."""
    for name in needed:
        if not entry.get(name):
            yield f"{name} is missing"
    unknown = sorted(set(entry) - _KEYS)
    if unknown:
        known = ", ".join(sorted(_KEYS))
        yield f"no key named {unknown[0]!r}. Known: {known}"
    for name in _TEXTS:
        text = entry.get(name, "")
        # Reject a list: as a regular expression, its text would be a character class that matches
        # everything.
        if not isinstance(text, str):
            yield f"{name}={text!r}; expected a text"
    device = entry.get("device", "")
    if device not in {"", "cpu", "cuda"}:
        yield f"device {device!r}; expected cpu or cuda"
    kind = entry.get("kind", "fails")
    if kind not in KINDS:
        yield f"kind {kind!r}; expected one of {', '.join(KINDS)}"
    if "when" in entry and "packages" in entry:
        yield "when and packages are one thing; give one of them"


def _parsed(entry: Mapping[str, Any], where: str) -> KnownIssue:
    """Return the issue of an entry in which ``_problems`` finds none.

    Raises:
        UsageProblem, InvalidRequirement: If a value is invalid in itself.
    """
    texts = {"id": "", "link": ""}
    for name in _TEXTS:
        if name in entry:
            texts[name] = entry[name]

    packages = entry.get("when", entry.get("packages", ()))
    package_names = _names(packages, "when, packages")
    check = _names(entry.get("check", _EVERY), "check")
    drivers = _names(entry.get("drivers", ()), "drivers")
    cells = [_facets(table) for table in _tables(entry.get("cells", {}))]
    strict = _strict(entry)
    requirements = [Requirement(text) for text in package_names]
    return KnownIssue(
        **texts,
        check=check,
        packages=package_names,
        drivers=drivers,
        cells=tuple(cells),
        strict=strict,
        where=where,
        requirements=tuple(requirements),
    )


def _strict(entry: Mapping[str, Any]) -> bool:
    """Return the value of ``strict``; by default whether the entry names a check or a test."""
    names_place = "check" in entry or "test" in entry
    strict = entry.get("strict", names_place)
    if not isinstance(strict, bool):
        raise UsageProblem(f"strict={strict!r}: expected true or false")
    if strict and not names_place:
        raise UsageProblem("strict = true says that it must fail; say where, with check or test")
    if entry.get("strict") and entry.get("kind", "").startswith("may_"):
        raise UsageProblem(f"kind {entry['kind']!r} is never strict")
    return strict


def _names(entry: Any, name: str) -> tuple[str, ...]:
    """Return a text, or a list of texts, as a tuple. Raises UsageProblem for anything else.

    Args:
        entry: The value.
        name: Its key, for the message.
    """
    if isinstance(entry, str):
        return (entry,)
    # The defaults are tuples.
    if not _is_sequence_of(entry, str):
        raise UsageProblem(f"{name}: expected a text or a list of texts, got {entry!r}")
    return tuple(entry)


def _tables(cells: Any) -> list[Mapping[str, Any]]:
    """Return the tables of facets of the key ``cells``: one, or a list of them.

    Raises:
        UsageProblem: For anything else, an empty list too.
    """
    if isinstance(cells, Mapping):
        return [cells]
    if not cells or not _is_list_of(cells, Mapping):
        raise UsageProblem(f"cells={cells!r}: expected a table of facets, or a list of such")
    return list(cells)


def _facets(entry: Mapping[str, Any]) -> dict[str, FacetValue]:
    """Return the facets of an expectation from a table, with tuples in place of TOML's lists."""
    facets: dict[str, FacetValue] = {}
    for name, value in entry.items():
        if value == []:
            raise UsageProblem(f"cells: {name} = [] is no cell; leave it out for all")
        if isinstance(value, list):
            facets[name] = tuple(value)
        else:
            facets[name] = value
    return facets


def concerned(driver: type[Driver]) -> tuple[str, ...]:
    """Return what an issue may name in ``drivers`` to apply to a driver.

    These are the driver's libraries and ``driver:NAME``.
    """
    return (*driver.libraries, f"driver:{driver.name}")


def concerning(
    issues: Iterable[KnownIssue], libraries: Iterable[str], device: str
) -> tuple[KnownIssue, ...]:
    """Return the issues that the installed packages have and that concern a driver.

    Issues that name neither a check nor a test come last, because others are more specific.

    Args:
        issues: All known issues.
        libraries: The names of the driver, see ``concerned``.
        device: ``cpu`` or ``cuda``.
    """
    names = set(libraries)
    chosen = []
    for issue in issues:
        concerns_driver = not issue.drivers or names.intersection(issue.drivers)
        if concerns_driver and issue.applies_on(device):
            chosen.append(issue)
    return tuple(sorted(chosen, key=_is_unspecific))


def _is_unspecific(issue: KnownIssue) -> bool:
    """Tell whether an issue names neither a check nor a test."""
    return not issue.strict and not issue.test and issue.check == (_EVERY,)


def applying(
    issues: Iterable[KnownIssue], libraries: Iterable[str], device: str
) -> tuple[Expectation, ...]:
    """Return the expectations of all issues that concern a driver and name no ``test``.

    The arguments are those of ``concerning``.
    """
    expectations: list[Expectation] = []
    for issue in concerning(issues, libraries, device):
        # Without a test the pattern is empty, and matches any text.
        if issue.matches_test(""):
            expectations += issue.expectations
    return tuple(expectations)
