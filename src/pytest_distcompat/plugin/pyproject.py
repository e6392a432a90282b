"""Reads ``[tool.distcompat]`` of pyproject.toml: options by their short names, and known issues under ``known``."""

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


class NamedOption(Protocol):
    """The attributes of ``options.Option`` that are read here."""

    @property
    def name(self) -> str:
        """The name with its prefix ``distcompat_``."""

    @property
    def metavar(self) -> str:
        """``NAMES`` if the option takes several names."""

    @property
    def repeated(self) -> bool:
        """Whether the text has one line for each value."""


def key_in_file(name: str) -> str:
    """Return the file, table and key of an option, for messages."""
    return f"{FILE} [tool.{_TOOL}] {name.removeprefix(_PREFIX)}"


def base(config: pytest.Config, origin: str) -> Path:
    """Return the directory that relative paths of that origin (``Setting.origin``) start from.

    Paths in a file start from the file's directory, wherever pytest is started, as pytest does for ini keys:
    https://docs.pytest.org/en/stable/reference/reference.html#pytest.Parser.addini
    """
    file = {"ini": config.inipath, "pyproject": config.rootpath / FILE}.get(origin)
    start = config.invocation_params.dir
    # Relative paths stay relative where possible: messages show them as they were written.
    return Path() if file is None or file.parent == start else file.parent


def _table(config: pytest.Config) -> Mapping[str, Any]:
    """Return the table of the file in pytest's root directory; empty if there is none. Raises pytest.UsageError.

    pytest itself reads the file only if no other file holds its ini options, and keeps no tables of other tools.
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
        # The usual case, which every start of pytest with the plugin installed goes through: do not parse.
        return {}
    try:
        table = _parse(text).get("tool", {}).get(_TOOL, {})
    except ValueError as error:
        raise pytest.UsageError(f"{path}: {error}") from None
    if not isinstance(table, Mapping):
        raise pytest.UsageError(f"{FILE}: tool.{_TOOL} is {table!r}; expected a table")
    return table


def _parse(text: str) -> dict[str, Any]:
    """Parse TOML. Raises ValueError."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    return tomllib.loads(text)


def project_name(config: pytest.Config) -> str:
    """Return the name of the project under test from the file in pytest's root directory; empty if it has none."""
    try:
        project = _parse((config.rootpath / FILE).read_text(encoding="utf-8")).get("project")
    except (OSError, ValueError):
        return ""
    return str(project.get("name", "")) if isinstance(project, dict) else ""


def options(config: pytest.Config, names: Collection[str]) -> list[str]:
    """Return the options that the table sets, with their prefix. Raises pytest.UsageError for an unknown key."""
    # The key "known" is not the option of that name: it holds the issues themselves, not names of files.
    allowed = {name.removeprefix(_PREFIX): name for name in names if name != f"{_PREFIX}{_KNOWN}"}
    for key in _table(config):
        if key not in {*allowed, _KNOWN}:
            listed = ", ".join(sorted({*allowed, _KNOWN}))
            raise pytest.UsageError(f"{FILE} [tool.{_TOOL}]: no key named {key!r}. Known: {listed}.")
    return [allowed[key] for key in _table(config) if key in allowed]


def text(config: pytest.Config, option: NamedOption) -> str | None:
    """Return an option's value as the command line would spell it; None if it is not set. Raises pytest.UsageError."""
    key = option.name.removeprefix(_PREFIX)
    value = _table(config).get(key)
    if value is None or key == _KNOWN:
        return None
    many = option.repeated or option.metavar == "NAMES"
    values = value if isinstance(value, list) and many else [value]
    if not all(isinstance(each, (str, int, float)) and not isinstance(each, bool) for each in values):
        expected = "a text, a number or a list of those" if many else "a text or a number"
        raise pytest.UsageError(f"{key_in_file(option.name)}: {value!r} is not right: expected {expected}.")
    return ("\n" if option.repeated else " ").join(map(str, values))


def known(config: pytest.Config) -> tuple[KnownIssue, ...]:
    """Return the known issues of ``[[tool.distcompat.known]]``. Raises pytest.UsageError for a wrong entry."""
    entries = _table(config).get(_KNOWN)
    if entries is None:
        return ()
    from pytest_distcompat.known import read_entries

    try:
        return read_entries(entries, f"{FILE} [[tool.{_TOOL}.{_KNOWN}]]")
    except UsageProblem as problem:
        raise pytest.UsageError(str(problem)) from None
