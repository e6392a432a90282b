"""What ``[tool.distcompat]`` of pyproject.toml says: options by their short names, and known issues under ``known``."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pytest

from pytest_distcompat.failures import UsageProblem

if TYPE_CHECKING:
    from pytest_distcompat.known import KnownIssue

FILE = "pyproject.toml"
_TOOL = "distcompat"
_KNOWN = "known"
_PREFIX = "distcompat_"
_TABLE: pytest.StashKey[Mapping[str, Any]] = pytest.StashKey()


class Named(Protocol):
    """What is asked of an option."""

    @property
    def name(self) -> str:
        """With its prefix."""

    @property
    def metavar(self) -> str:
        """``NAMES`` where it takes several."""

    @property
    def repeated(self) -> bool:
        """Whether its text is a line for each."""


def place(name: str) -> str:
    """Where an option stands, for messages."""
    return f"{FILE} [tool.{_TOOL}] {name.removeprefix(_PREFIX)}"


def base(config: pytest.Config, origin: str) -> Path:
    """What paths of that origin (``Setting.origin``) are relative to: a file is read alike from wherever pytest is started.

    https://docs.pytest.org/en/stable/reference/reference.html#pytest.Parser.addini says it of ini keys.
    """
    file = {"ini": config.inipath, "pyproject": config.rootpath / FILE}.get(origin)
    here = config.invocation_params.dir
    # What is relative stays so where it can: messages show it as it was written.
    return Path() if file is None or file.parent == here else file.parent


def _table(config: pytest.Config) -> Mapping[str, Any]:
    """The table of the file in pytest's root directory, empty if there is none. Raises pytest.UsageError.

    pytest reads the file itself only where no other one holds its ini options, and keeps nothing of other tools' tables.
    """
    if _TABLE not in config.stash:
        config.stash[_TABLE] = _read(config)
    return config.stash[_TABLE]


def _read(config: pytest.Config) -> Mapping[str, Any]:
    path = config.rootpath / FILE
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        return {}
    if _TOOL not in text:
        # The usual case, in every start of pytest where the plugin is installed.
        return {}
    try:
        found = _parsed(text).get("tool", {}).get(_TOOL, {})
    except ValueError as error:
        raise pytest.UsageError(f"{path}: {error}") from None
    if not isinstance(found, Mapping):
        raise pytest.UsageError(f"{FILE}: tool.{_TOOL} is {found!r}; expected a table")
    return found


def _parsed(text: str) -> dict[str, Any]:
    """Return what that TOML says. Raises ValueError for what is none."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    return tomllib.loads(text)


def project_name(config: pytest.Config) -> str:
    """Return what the project under test is called, by the file in pytest's root directory; empty if it does not say."""
    try:
        project = _parsed((config.rootpath / FILE).read_text(encoding="utf-8")).get("project")
    except (OSError, ValueError):
        return ""
    return str(project.get("name", "")) if isinstance(project, dict) else ""


def options(config: pytest.Config, names: Collection[str]) -> list[str]:
    """The options that the table sets, with their prefix. Raises pytest.UsageError for a key that is none."""
    # What is said of one option there is said under another name: entries, not names of files.
    allowed = {name.removeprefix(_PREFIX): name for name in names if name != f"{_PREFIX}{_KNOWN}"}
    for key in _table(config):
        if key not in {*allowed, _KNOWN}:
            listed = ", ".join(sorted({*allowed, _KNOWN}))
            raise pytest.UsageError(f"{FILE} [tool.{_TOOL}]: no key named {key!r}. Known: {listed}.")
    return [allowed[key] for key in _table(config) if key in allowed]


def text(config: pytest.Config, option: Named) -> str | None:
    """What the table says of an option, as the command line would; None for nothing. Raises pytest.UsageError."""
    key = option.name.removeprefix(_PREFIX)
    value = _table(config).get(key)
    if value is None or key == _KNOWN:
        return None
    many = option.repeated or option.metavar == "NAMES"
    words = value if isinstance(value, list) and many else [value]
    if not all(isinstance(word, (str, int, float)) and not isinstance(word, bool) for word in words):
        expected = "a text, a number or a list of those" if many else "a text or a number"
        raise pytest.UsageError(f"{place(option.name)}: {value!r} is not right: expected {expected}.")
    return ("\n" if option.repeated else " ").join(map(str, words))


def known(config: pytest.Config) -> tuple[KnownIssue, ...]:
    """The known issues of ``[[tool.distcompat.known]]``. Raises pytest.UsageError for one that is wrong."""
    entries = _table(config).get(_KNOWN)
    if entries is None:
        return ()
    from pytest_distcompat.known import read_entries

    try:
        return read_entries(entries, f"{FILE} [[tool.{_TOOL}.{_KNOWN}]]")
    except UsageProblem as problem:
        raise pytest.UsageError(str(problem)) from None
