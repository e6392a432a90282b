"""pytest's settings of a repository: their file and table, their values, and how to write one."""

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
    """Settings in section ``table`` of ``file``, which need not exist yet."""

    file: Path
    table: str
    values: Mapping[str, Any] = field(default_factory=dict)
    exists: bool = False

    def listed(self, name: str) -> tuple[str, ...]:
        """Return a setting of several names.

        It is a list in TOML, and elsewhere a shell-like text.

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
        """Return the line for the file.

        ``several`` says that pytest expects a list, or a shell-like text.
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
            # Files with pytest in their name count even if they have no such table.
            if values is not None or "pytest" in name:
                return Settings(path, table, values or {}, exists=True)
    return Settings(root / "pytest.ini", "pytest")


def _table(data: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """Return the table of a dotted name, without the older table nested in it.

    None if there is no such table.
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
    """Return the tables of a file. Raises UsageProblem."""
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
    """Return the path relative to the repository, even if it is above it."""
    return Path(os.path.relpath(path, root))
