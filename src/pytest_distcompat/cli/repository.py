"""What a repository tells of itself: where its tests and its pytest settings are, which trainer it has."""

from __future__ import annotations

import ast
import configparser
import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

#: Where pytest looks for its settings, in its own order, with the table that they stand in
#: (https://docs.pytest.org/en/stable/reference/customize.html).
SETTINGS = (
    # The tables of pytest 9, whose values have types. It refuses a pyproject.toml that has its old table too.
    ("pytest.toml", "pytest"),
    (".pytest.toml", "pytest"),
    ("pytest.ini", "pytest"),
    (".pytest.ini", "pytest"),
    ("pyproject.toml", "tool.pytest"),
    ("pyproject.toml", "tool.pytest.ini_options"),
    ("tox.ini", "pytest"),
    ("setup.cfg", "tool:pytest"),
)
#: Library to the built-in driver, the one that stands on the others first.
DRIVERS = {"transformers": "trainer", "accelerate": "accelerate", "deepspeed": "deepspeed", "torch": "torch"}
#: What is not the repository's own.
_FOREIGN = {"node_modules", "build", "dist", "site-packages", "docs"}


@dataclass(frozen=True)
class Class:
    """A class of the repository, by the name under which it is imported; that name begins in ``top``, below the root."""

    module: str
    name: str
    top: Path = Path()


@dataclass(frozen=True)
class Repository:
    """``tests`` and ``settings`` are relative to ``root``; ``table`` is the section of ``settings``, which may not exist yet.

    ``imports`` are the libraries of DRIVERS that the code imports; ``driver`` a subclass of ours that it has already, and
    ``trainer`` one of ``transformers.Trainer``, each the first in the order of their paths. ``pythonpath`` is what pytest puts on
    ``sys.path`` already.
    """

    root: Path
    tests: Path
    settings: Path
    table: str
    imports: frozenset[str]
    driver: Class | None = None
    trainer: Class | None = None
    on_github: bool = False
    importlib_mode: bool = False
    installs: bool = False
    pythonpath: tuple[str, ...] = ()


def look_at(root: Path) -> Repository:
    """All that can be found out by reading; nothing is imported or run."""
    settings, table = next(_settings(root), ("pyproject.toml", "tool.pytest.ini_options"))
    if settings == "pyproject.toml" and not (root / settings).exists():
        settings, table = "pytest.ini", "pytest"
    told = _read_settings(root / settings, table)
    tests = next(
        (Path(name) for name in [*_listed(told, "testpaths"), "tests", "test"] if (root / name).is_dir()), Path("tests")
    )
    imports: set[str] = set()
    found: dict[str, Class] = {}
    for path in _own(root):
        with contextlib.suppress(SyntaxError, UnicodeDecodeError):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            imports |= set(_imports(tree)) & set(DRIVERS)
            for kind, name in _classes(tree):
                found.setdefault(kind, Class(*_module(root, tests, path, name)))
    return Repository(
        root,
        tests,
        Path(settings),
        table,
        frozenset(imports),
        driver=found.get("driver"),
        trainer=found.get("trainer"),
        on_github=(root / ".github").is_dir() or _remote_is_github(root),
        importlib_mode="importlib" in str(told.get("addopts", "")),
        installs=any((root / name).exists() for name in ("pyproject.toml", "setup.py", "setup.cfg")),
        pythonpath=_listed(told, "pythonpath"),
    )


def _listed(told: dict[str, Any], name: str) -> tuple[str, ...]:
    """A setting of several names: a list in TOML, elsewhere a text with spaces."""
    value = told.get(name, "")
    return tuple(map(str, value)) if isinstance(value, list) else tuple(str(value).split())


def _settings(root: Path) -> Iterator[tuple[str, str]]:
    """The files that hold settings of pytest's already; those of its own name do so even if they are empty."""
    for name, table in SETTINGS:
        path = root / name
        if path.exists() and ("pytest" in name or _has_table(path, table)):
            yield name, table


def _has_table(path: Path, table: str) -> bool:
    return f"[{table}]" in (line.strip() for line in path.read_text(encoding="utf-8").splitlines())


def _read_settings(path: Path, table: str) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".toml":
            found: Any = tomllib.loads(text)
            for part in table.split("."):
                found = found.get(part, {})
            return dict(found)
        parser = configparser.ConfigParser(interpolation=None)
        parser.read_string(text)
        return dict(parser[table])
    except (OSError, tomllib.TOMLDecodeError, configparser.Error, KeyError):
        return {}


def _own(root: Path) -> Iterator[Path]:
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts[:-1]
        environment = any((root.joinpath(*parts[: n + 1]) / "pyvenv.cfg").exists() for n in range(len(parts)))
        if not environment and not any(part in _FOREIGN or part.startswith(".") for part in parts):
            yield path


def _imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module]
        yield from (name.partition(".")[0] for name in names)


def _classes(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(what it is a subclass of, its name), for the classes at the top of a module."""
    from_us = "pytest_distcompat" in _imports(tree)
    for node in tree.body:
        bases = (
            {ast.unparse(base).rpartition(".")[2] for base in node.bases} if isinstance(node, ast.ClassDef) else set()
        )
        if isinstance(node, ast.ClassDef) and "Trainer" in bases and "transformers" in _imports(tree):
            yield "trainer", node.name
        elif isinstance(node, ast.ClassDef) and from_us and any(base.endswith("Driver") for base in bases):
            yield "driver", node.name


def _module(root: Path, tests: Path, path: Path, name: str) -> tuple[str, str, Path]:
    """The fields of a Class, as it is imported: packages by their own name, test modules from their directory."""
    top = path.parent
    while (top / "__init__.py").exists() and top != root:
        top = top.parent
    if tests in path.relative_to(root).parents and (root / tests / "__init__.py").exists():
        top = root
    module = ".".join(path.relative_to(top).with_suffix("").parts).removesuffix(".__init__")
    return module, name, top.relative_to(root)


def _remote_is_github(root: Path) -> bool:
    config = root / ".git" / "config"
    return config.is_file() and "github.com" in config.read_text(encoding="utf-8", errors="replace")
