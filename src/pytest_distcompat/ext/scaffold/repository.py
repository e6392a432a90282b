"""Inspection of a repository: its tests, its pytest settings, its trainer."""

from __future__ import annotations

import ast
import contextlib
import keyword
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pytest_distcompat.ext.scaffold.pytest_settings import Settings, relative, settings_of

#: Library to the built-in driver; a library comes before those that it uses.
DRIVERS = {"transformers": "trainer", "accelerate": "accelerate", "deepspeed": "deepspeed", "torch": "torch"}
#: What wraps a model, to its strategy.
STRATEGY_OF = {"fully_shard": "fsdp2", "FullyShardedDataParallel": "fsdp1", "DistributedDataParallel": "ddp"}
#: Directories whose code is not the repository's own.
_FOREIGN = {"node_modules", "build", "dist", "site-packages", "docs"}


@dataclass(frozen=True)
class Class:
    """Class of the repository, by its import name, which is relative to ``top``, a directory below the root."""

    module: str
    name: str
    top: Path = Path()


@dataclass(frozen=True)
class Repository:
    """Facts about a repository; ``tests`` is relative to ``root``.

    ``driver`` is the first subclass of Driver, ``trainer`` of ``transformers.Trainer``, ``loop`` the first
    module that calls ``backward``, tests last, by the strategy that it names. ``nameless`` are messages about classes in files
    that cannot be imported. ``pythonpath`` are the directories that pytest already puts on ``sys.path``.
    """

    root: Path
    tests: Path
    settings: Settings
    imports: frozenset[str]
    driver: Class | None = None
    trainer: Class | None = None
    loop: Class | None = None
    nameless: tuple[str, ...] = ()
    on_github: bool = False
    importlib_mode: bool = False
    installs: bool = False
    pythonpath: tuple[Path, ...] = ()


def inspect_repository(root: Path) -> Repository:
    """Inspect a repository by reading its files; nothing is imported or run. Raises UsageProblem."""
    settings = settings_of(root)
    above = relative(settings.file.parent, root)
    # The settings may belong to a directory above.
    named = settings.listed("testpaths") if above == Path() else ()
    tests = next((Path(name) for name in (*named, "tests", "test") if (root / name).is_dir()), Path("tests"))
    imports: set[str] = set()
    found: dict[str, Class] = {}
    nameless = []
    # Tests come last: a class there may be a test double.
    for path in sorted(_own(root), key=lambda path: tests in path.relative_to(root).parents):
        # Skip dangling links, directories named *.py and files that are no Python.
        with contextlib.suppress(OSError, SyntaxError, ValueError, RecursionError):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            imports |= set(_imports(tree)) & set(DRIVERS)
            module, top = _module(root, tests, path)
            importable = all(part.isidentifier() and not keyword.iskeyword(part) for part in module.split("."))
            if strategy := _strategy_of_loop(tree):
                found.setdefault("loop", Class(module, strategy, top))
            for kind, name in _classes(tree):
                if importable:
                    found.setdefault(kind, Class(module, name, top))
                else:
                    nameless.append(f"{path.relative_to(root)}: no import can name that file, so {name} has no driver")
    return Repository(
        root,
        tests,
        settings,
        frozenset(imports),
        driver=found.get("driver"),
        trainer=found.get("trainer"),
        loop=found.get("loop"),
        nameless=tuple(nameless),
        on_github=(root / ".github").is_dir() or _remote_is_github(root),
        importlib_mode="importlib" in str(settings.values.get("addopts", "")),
        installs=any((root / name).exists() for name in ("pyproject.toml", "setup.py", "setup.cfg")),
        pythonpath=tuple(relative(root / above / name, root) for name in settings.listed("pythonpath")),
    )


def _own(root: Path) -> Iterator[Path]:
    """Yield the repository's own Python files: none of virtual environments, build and hidden directories."""
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts[:-1]
        environment = any((root.joinpath(*parts[: n + 1]) / "pyvenv.cfg").exists() for n in range(len(parts)))
        if not environment and not any(part in _FOREIGN or part.startswith(".") for part in parts):
            yield path


def _imports(tree: ast.Module) -> Iterator[str]:
    """Yield the top-level names of the packages that a module imports."""
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module]
        yield from (name.partition(".")[0] for name in names)


def _classes(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield (kind, name) for each subclass of a ``trainer`` or ``driver`` at the top level of a module."""
    from_us = "pytest_distcompat" in _imports(tree)
    trainers = set(_trainers(tree))
    for node in tree.body:
        bases = {ast.unparse(base) for base in node.bases} if isinstance(node, ast.ClassDef) else set()
        if isinstance(node, ast.ClassDef) and bases & trainers:
            yield "trainer", node.name
        elif isinstance(node, ast.ClassDef) and from_us and any(base.endswith("Driver") for base in bases):
            yield "driver", node.name


def _strategy_of_loop(tree: ast.Module) -> str:
    """Return the strategy that a module names which calls ``backward``, ``ddp`` if it names none; empty without a call."""
    nodes = list(ast.walk(tree))
    calls = [node.func for node in nodes if isinstance(node, ast.Call)]
    if not any(isinstance(one, ast.Attribute) and one.attr == "backward" for one in calls):
        return ""
    names = {one.id for one in nodes if isinstance(one, ast.Name)}
    names |= {one.attr for one in nodes if isinstance(one, ast.Attribute)}
    names |= {one.name for one in nodes if isinstance(one, ast.alias)}
    return next((strategy for name, strategy in STRATEGY_OF.items() if name in names), "ddp")


def _trainers(tree: ast.Module) -> Iterator[str]:
    """Yield the names of ``transformers.Trainer`` in a module; Lightning has a Trainer too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = (alias.asname or alias.name for alias in node.names if alias.name == "transformers")
            yield from (f"{name}.Trainer" for name in names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "transformers":
            yield from (alias.asname or alias.name for alias in node.names if alias.name == "Trainer")


def _module(root: Path, tests: Path, path: Path) -> tuple[str, Path]:
    """Return the import name of a module and the directory that it is relative to."""
    top = path.parent
    while (top / "__init__.py").exists() and top != root:
        top = top.parent
    if tests in path.relative_to(root).parents and (root / tests / "__init__.py").exists():
        top = root
    module = ".".join(path.relative_to(top).with_suffix("").parts).removesuffix(".__init__")
    return module, top.relative_to(root)


def _remote_is_github(root: Path) -> bool:
    config = root / ".git" / "config"
    return config.is_file() and "github.com" in config.read_text(encoding="utf-8", errors="replace")
