"""pytest's settings of a repository: which file and table holds them, what is in it, and how a key comes into it."""

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

# What pytest itself reads them by, and requires.
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
    """``table`` is the section of ``file``, neither of which need be there yet; ``values`` is what it says.

    ``ours`` is the table ``[tool.distcompat]`` of a pyproject.toml beside it.
    """

    file: Path
    table: str
    values: Mapping[str, Any] = field(default_factory=dict)
    ours: Mapping[str, Any] = field(default_factory=dict)

    def listed(self, name: str) -> tuple[str, ...]:
        """A setting of several names: a list in TOML, elsewhere a text as for a shell. Raises UsageProblem."""
        value = self.values.get(name, "")
        try:
            return tuple(map(str, value)) if isinstance(value, list) else tuple(shlex.split(str(value)))
        except ValueError as error:
            raise UsageProblem(f"{self.file}: {name} = {value}: {error}") from None

    def line(self, key: str, value: str, *, several: bool = False) -> str:
        """How the file says it; ``several``: where pytest wants a list, or in a text the names as for a shell."""
        toml = self.file.suffix == ".toml"
        if several and toml and self.table != "tool.pytest.ini_options":
            return f"{key} = [{json.dumps(value, ensure_ascii=False)}]"
        text = shlex.quote(value) if several else value
        return f"{key} = {json.dumps(text, ensure_ascii=False) if toml else text}"

    def put(self, line: str) -> bool:
        """Write that line right below the head of the table, and leave all else as it is; False where that cannot be done."""
        text = read(self.file) if self.file.exists() else ""
        lines = text.splitlines(keepends=True)
        end = "\r\n" if lines and lines[0].endswith("\r\n") else "\n"
        if lines and not lines[-1].endswith("\n"):
            lines[-1] += end
        place = next((number for number, one in enumerate(lines) if self._is_head(one)), -1)
        if place < 0:
            lines += [*([end] if lines else []), f"[{self.table}]{end}"]
            place = len(lines) - 1
        lines.insert(place + 1, line + end)
        now = "".join(lines)
        try:
            before, after = (_table(_parsed(self.file, one), self.table) or {} for one in (text, now))
        except UsageProblem:
            # The table is there in another way: ini_options = {...}
            return False
        key = line.partition(" ")[0]
        if key not in after or {name: value for name, value in after.items() if name != key} != before:
            return False
        self.file.write_bytes(now.encode())
        return True

    def _is_head(self, line: str) -> bool:
        if self.file.suffix == ".toml":
            name = r"\s*\.\s*".join(map(re.escape, self.table.split(".")))
            return re.fullmatch(rf"\s*\[\s*{name}\s*\]\s*(#.*)?", line.strip()) is not None
        return re.split("[#;]", line)[0].rstrip() == f"[{self.table}]"


def settings_of(root: Path) -> Settings:
    """Those that pytest reads there, be it from a directory above, or those that are to be made.

    Raises UsageProblem for a file that it cannot read.
    """
    for directory in (root, *root.parents):
        for name, table in TABLES:
            path = directory / name
            found = _table(_parsed(path), table) if path.is_file() else None
            # Those of its own name count even if they are empty.
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
    """Its tables. Raises UsageProblem."""
    told = read(path) if text is None else text
    try:
        if path.suffix == ".toml":
            return tomllib.loads(told)
        return {section.name: dict(section.items()) for section in iniconfig.IniConfig(str(path), data=told)}
    except (tomllib.TOMLDecodeError, iniconfig.ParseError) as error:
        raise UsageProblem(str(error) if str(path) in str(error) else f"{path}: {error}") from None


def read(path: Path) -> str:
    """With its line ends as they are. Raises UsageProblem."""
    try:
        return path.read_bytes().decode()
    except OSError as error:
        raise UsageProblem(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageProblem(f"{path}: {error}") from None


def relative(path: Path, root: Path) -> Path:
    """As it is told: from the repository, be it above it."""
    return Path(os.path.relpath(path, root))
