"""Reading of known issues from TOML files, with a message for each mistake in them.

A known issue is a bug of another project, with the versions and cells that show it. A file has
``version = 1`` and an ``[[issue]]`` for each issue; ``docs/known.md`` has all keys:

    [[issue]]
    match = "KeyError: '_orig_mod"
    when = "transformers == 5.1.0"
    reason = "https://github.com/my/trainer/issues/1"

``read_file`` is called for a user's file (``--distcompat-known``), and by ``shipped`` for the files
that extensions ship (entry point ``pytest_distcompat.known_issues``). It returns a ``KnownIssue``
for each entry, or raises ``UsageProblem``.
"""

from __future__ import annotations

import datetime as dt
import functools
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement

from pytest_distcompat.expect import FacetValue
from pytest_distcompat.failures import UsageProblem
from pytest_distcompat.known.issue import EVERY, KINDS, KnownIssue
from pytest_distcompat.registry import Registry

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

#: The version of the format. It rises when an older release would misread a new file.
FORMAT = 1

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
#: All keys that an issue may have.
_KEYS = {*_TEXTS, "check", "packages", "when", "drivers", "cells", "strict"}


@dataclass(frozen=True)
class IssueFile:
    """A file of issues that an extension ships."""

    #: A name that no other such file has: ``upstream``.
    name: str
    #: The TOML file.
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
        needed: The keys that each issue must have. A shipped issue needs more of them.

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
    """Return the issues of all entries.

    Args:
        entries: What the file has under ``issue``. It should be a list of tables.
        where: The file and the key, for messages: ``known issues my.toml: issue``.
        needed: The keys that each issue must have.

    Raises:
        UsageProblem: If an entry is invalid, or two have one id.
    """
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
    """Return the issue of an entry. Raises UsageProblem, whose message begins with ``where``."""
    where = f"{where} ({_title(entry, needed)})"
    if isinstance(entry.get("until"), dt.date):
        # A date without quotes is a date in TOML, too.
        entry = {**entry, "until": str(entry["until"])}
    # The first problem is reported; a user mends one after the other.
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
    """Return how messages call an entry: its id, or its reason if an id is not required."""
    if entry.get("id"):
        return entry["id"]
    if "id" in needed:
        return "no id"
    return entry.get("reason", "no reason")


def _problems(entry: Mapping[str, Any], needed: Iterable[str]) -> Iterator[str]:
    """Yield a text for each key of an entry that is wrong, missing, or has a wrong value."""
    for name in needed:
        if not entry.get(name):
            yield f"{name} is missing"
    unknown = sorted(set(entry) - _KEYS)
    if unknown:
        known = ", ".join(sorted(_KEYS))
        yield f"no key named {unknown[0]!r}. Known: {known}"
    for name in _TEXTS:
        text = entry.get(name, "")
        # A list must not get through: ``str(["ab"])`` is a regular expression that matches much,
        # a class of characters.
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
    check = _names(entry.get("check", EVERY), "check")
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
    """Return whether each test that the issue covers must fail.

    By default it is so if the entry names a check or a test: without either the issue covers tests
    that never meet the bug.
    """
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
    # A missing key has the default ``()``, which is a tuple, not a list.
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
