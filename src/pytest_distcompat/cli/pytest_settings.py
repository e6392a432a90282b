"""pytest's settings of a repository: their file and table, their values, and how to add a key."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# pytest depends on it, and reads ini files with it.
import iniconfig

from pytest_distcompat.failures import UsageProblem

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

#: Where pytest looks for its settings, in its own order, with the table that they stand in
#: (https://docs.pytest.org/en/stable/reference/customize.html).
TABLES = (
    # The tables of pytest 9, whose values have types. It refuses a pyproject.toml that has its old table too.
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
    """Settings in section ``table`` of ``file``, neither of which need exist yet.

    ``ours`` is the table ``[tool.distcompat]`` of a pyproject.toml beside it.
    """

    file: Path
    table: str
    values: Mapping[str, Any] = field(default_factory=dict)
    ours: Mapping[str, Any] = field(default_factory=dict)

    def listed(self, name: str) -> tuple[str, ...]:
        """Return a setting of several names: a list in TOML, elsewhere a shell-like text. Raises UsageProblem."""
        value = self.values.get(name, "")
        try:
            return tuple(map(str, value)) if isinstance(value, list) else tuple(shlex.split(str(value)))
        except ValueError as error:
            raise UsageProblem(f"{self.file}: {name} = {value}: {error}") from None

    def line(self, key: str, value: str, *, several: bool = False) -> str:
        """Return the line for the file; ``several``: pytest expects a list, or a shell-like text."""
        toml = self.file.suffix == ".toml"
        if several and toml and self.table != "tool.pytest.ini_options":
            return f"{key} = [{json.dumps(value, ensure_ascii=False)}]"
        text = shlex.quote(value) if several else value
        return f"{key} = {json.dumps(text, ensure_ascii=False) if toml else text}"

    def put(self, line: str) -> bool:
        """Insert that line below the head of the table; tell whether that could be done."""
        text = read(self.file) if self.file.exists() else ""
        lines = text.splitlines(keepends=True)
        end = "\r\n" if lines and lines[0].endswith("\r\n") else "\n"
        if lines and not lines[-1].endswith("\n"):
            lines[-1] += end
        head = next((index for index, one in enumerate(lines) if self._is_head(one)), -1)
        if head < 0:
            lines += [*([end] if lines else []), f"[{self.table}]{end}"]
            head = len(lines) - 1
        lines.insert(head + 1, line + end)
        new_text = "".join(lines)
        try:
            before, after = (_table(_parsed(self.file, one), self.table) or {} for one in (text, new_text))
        except UsageProblem:
            # The table is written in another way: ini_options = {...}
            return False
        key = line.partition(" ")[0]
        if key not in after or {name: value for name, value in after.items() if name != key} != before:
            return False
        self.file.write_bytes(new_text.encode())
        return True

    def _is_head(self, line: str) -> bool:
        if self.file.suffix == ".toml":
            name = r"\s*\.\s*".join(map(re.escape, self.table.split(".")))
            return re.fullmatch(rf"\s*\[\s*{name}\s*\]\s*(#.*)?", line.strip()) is not None
        return re.split("[#;]", line)[0].rstrip() == f"[{self.table}]"


def settings_of(root: Path) -> Settings:
    """Return the settings that pytest reads in a directory or above it, or those to create.

    Raises UsageProblem for a file that it cannot read.
    """
    for directory in (root, *root.parents):
        for name, table in TABLES:
            path = directory / name
            found = _table(_parsed(path), table) if path.is_file() else None
            # Files with pytest in their name count even if they are empty.
            if found is not None or ("pytest" in name and path.is_file()):
                return Settings(path, table, found or {}, _ours(directory))
    if (root / "pyproject.toml").is_file():
        return Settings(root / "pyproject.toml", "tool.pytest.ini_options", {}, _ours(root))
    return Settings(root / "pytest.ini", "pytest")


def _ours(directory: Path) -> Mapping[str, Any]:
    path = directory / "pyproject.toml"
    return (_table(_parsed(path), "tool.distcompat") or {}) if path.is_file() else {}


def _table(data: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    found: Any = data
    for part in name.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return {key: value for key, value in found.items() if key != "ini_options"} if isinstance(found, dict) else None


def _parsed(path: Path, text: str | None = None) -> dict[str, Any]:
    """Return the tables of a file. Raises UsageProblem."""
    content = read(path) if text is None else text
    try:
        if path.suffix == ".toml":
            return tomllib.loads(content)
        return {section.name: dict(section.items()) for section in iniconfig.IniConfig(str(path), data=content)}
    except (tomllib.TOMLDecodeError, iniconfig.ParseError) as error:
        raise UsageProblem(str(error) if str(path) in str(error) else f"{path}: {error}") from None


def read(path: Path) -> str:
    """Return the text of a file with its line ends as they are. Raises UsageProblem."""
    try:
        return path.read_bytes().decode()
    except OSError as error:
        raise UsageProblem(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageProblem(f"{path}: {error}") from None


def relative(path: Path, root: Path) -> Path:
    """Return the path relative to the repository, even if it is above it."""
    return Path(os.path.relpath(path, root))
