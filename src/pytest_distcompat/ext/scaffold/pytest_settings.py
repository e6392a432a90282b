"""pytest's settings of a repository: their file and table, their values, and how to write one.

``repository`` calls ``settings_of(root)`` for ``distcompat init``. pytest reads its settings from
the first of several files that has them, as TOML or as an ini file. ``Settings.line`` returns a
line that sets a value in that file, such as ``distcompat_profile = "smoke"``.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# pytest depends on it, and reads ini files with it.
import iniconfig

from pytest_distcompat.cli.output import named_in_errors
from pytest_distcompat.failures import UsageProblem

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

#: Where pytest looks for its settings, in its own order, with the table that they stand in
#: (https://docs.pytest.org/en/stable/reference/customize.html).
TABLES = (
    # The tables of pytest 9, whose values have types. It refuses a pyproject.toml that has its old
    # table too.
    ("pytest.toml", "pytest"),
    (".pytest.toml", "pytest"),
    ("pytest.ini", "pytest"),
    (".pytest.ini", "pytest"),
    ("pyproject.toml", "tool.pytest.ini_options"),
    ("pyproject.toml", "tool.pytest"),
    ("tox.ini", "pytest"),
    ("setup.cfg", "tool:pytest"),
)


@dataclass(frozen=True)
class Settings:
    """pytest's settings in one file, which need not exist yet."""

    #: The absolute path.
    file: Path
    #: The table or section in it: ``tool.pytest.ini_options``.
    table: str
    #: The name of a setting -> its value; a list in TOML, else a text.
    values: Mapping[str, Any] = field(default_factory=dict)
    #: Whether the file exists and has the table.
    exists: bool = False

    def listed(self, name: str) -> tuple[str, ...]:
        """Return a setting of several names, such as ``testpaths``; empty if it is not set.

        It is a list in TOML, and elsewhere a text of words, quoted as in a shell.

        Raises:
            UsageProblem: The text has an error, such as an open quote.
        """
        value = self.values.get(name, "")
        try:
            names = value if isinstance(value, list) else shlex.split(str(value))
        except ValueError as error:
            problem = f"{name} = {value}: {error}"
            raise UsageProblem(f"{self.file}: {problem}") from None
        return tuple(map(str, names))

    def line(self, key: str, value: str, *, several: bool = False) -> str:
        """Return the line that sets a value: ``pythonpath = ["src"]``.

        Args:
            key: The setting.
            value: Its value.
            several: Whether pytest expects a list there, or a text of words quoted as in a shell.
        """
        toml = self.file.suffix == ".toml"
        if several and toml and self.table != "tool.pytest.ini_options":
            return f"{key} = [{json.dumps(value, ensure_ascii=False)}]"
        text = shlex.quote(value) if several else value
        if toml:
            text = json.dumps(text, ensure_ascii=False)
        return f"{key} = {text}"


def settings_of(root: Path) -> Settings:
    """Return the settings that pytest reads in a directory or above it, or those to create.

    Raises:
        UsageProblem: A file cannot be parsed.
    """
    for directory in (root, *root.parents):
        for name, table in TABLES:
            path = directory / name
            if not path.is_file():
                continue
            values = _table(_parsed(path), table)
            # Files with pytest in their name count even if they have no such table: pytest reads no
            # other file then.
            if values is not None or "pytest" in name:
                return Settings(path, table, values or {}, exists=True)
    return Settings(root / "pytest.ini", "pytest")


def _table(data: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """Return the table of a dotted name, such as ``tool.pytest``; None if there is none.

    The older table ``tool.pytest.ini_options`` is nested in it, and left out.
    """
    table: Any = data
    for part in name.split("."):
        if not isinstance(table, dict):
            return None
        table = table.get(part)
    if not isinstance(table, dict):
        return None
    values = dict(table)
    values.pop("ini_options", None)
    return values


def _parsed(path: Path) -> dict[str, Any]:
    """Return the tables of a file, by name. Raises UsageProblem if it cannot be parsed."""
    try:
        with named_in_errors(path):
            content = path.read_text(encoding="utf-8")
        if path.suffix == ".toml":
            return tomllib.loads(content)
        sections = iniconfig.IniConfig(str(path), data=content)
        return {section.name: dict(section.items()) for section in sections}
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, iniconfig.ParseError) as error:
        problem = str(error)
        if str(path) not in problem:
            problem = f"{path}: {problem}"
        raise UsageProblem(problem) from None


def relative(path: Path, root: Path) -> Path:
    """Return the path relative to a directory, such as ``../pytest.ini`` for one above it."""
    return Path(os.path.relpath(path, root))
