"""Inspection of a repository: its tests, its pytest settings, its trainer."""

from __future__ import annotations

import ast
import contextlib
import keyword
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pytest_distcompat.ext.scaffold.pytest_settings import Settings, relative, settings_of

#: Library to the built-in driver; a library comes before those that it uses.
DRIVERS = {
    "transformers": "trainer",
    "accelerate": "accelerate",
    "deepspeed": "deepspeed",
    "torch": "torch",
}
#: What wraps a model, to its strategy.
STRATEGY_OF = {
    "fully_shard": "fsdp2",
    "FullyShardedDataParallel": "fsdp1",
    "DistributedDataParallel": "ddp",
}
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


@dataclass
class _Inspection:
    """What the Python files of a repository contain, added up file by file."""

    root: Path
    tests: Path
    imports: set[str] = field(default_factory=set)
    #: The first class of each kind: ``driver``, ``trainer``, ``loop``.
    classes: dict[str, Class] = field(default_factory=dict)
    nameless: list[str] = field(default_factory=list)

    def add(self, path: Path) -> None:
        """Add what a file contains. Raises OSError, SyntaxError, ValueError or RecursionError if it cannot be parsed."""
        tree = ast.parse(path.read_text(encoding="utf-8"))
        self.imports |= set(_imports(tree)) & set(DRIVERS)
        module, top = _module(self.root, self.tests, path)
        strategy = _strategy_of_loop(tree)
        if strategy:
            self.classes.setdefault("loop", Class(module, strategy, top))
        importable = _is_importable(module)
        for kind, name in _classes(tree):
            if importable:
                self.classes.setdefault(kind, Class(module, name, top))
            else:
                relative_path = path.relative_to(self.root)
                self.nameless.append(
                    f"{relative_path}: no import can name that file, so {name} has no driver"
                )


def inspect_repository(root: Path) -> Repository:
    """Inspect a repository by reading its files; nothing is imported or run. Raises UsageProblem."""
    settings = settings_of(root)
    settings_directory = relative(settings.file.parent, root)
    tests = _tests_directory(root, settings, settings_directory)
    inspection = _Inspection(root, tests)
    for path in _tests_last(root, tests):
        # Skip dangling links, directories named *.py and files that are no Python.
        with contextlib.suppress(OSError, SyntaxError, ValueError, RecursionError):
            inspection.add(path)
    pythonpath = [
        relative(root / settings_directory / name, root) for name in settings.listed("pythonpath")
    ]
    return Repository(
        root,
        tests,
        settings,
        frozenset(inspection.imports),
        driver=inspection.classes.get("driver"),
        trainer=inspection.classes.get("trainer"),
        loop=inspection.classes.get("loop"),
        nameless=tuple(inspection.nameless),
        on_github=(root / ".github").is_dir() or _remote_is_github(root),
        importlib_mode="importlib" in str(settings.values.get("addopts", "")),
        installs=_can_be_installed(root),
        pythonpath=tuple(pythonpath),
    )


def _tests_directory(root: Path, settings: Settings, settings_directory: Path) -> Path:
    """Return the directory of the tests, relative to the root: the first that exists, ``tests`` if none does."""
    candidates = ["tests", "test"]
    # The settings may belong to a directory above, and then name that one's tests.
    if settings_directory == Path():
        candidates = [*settings.listed("testpaths"), *candidates]
    for name in candidates:
        if (root / name).is_dir():
            return Path(name)
    return Path("tests")


def _tests_last(root: Path, tests: Path) -> list[Path]:
    """Return the repository's own Python files, tests last: a class there may be a test double."""

    def is_test(path: Path) -> bool:
        return tests in path.relative_to(root).parents

    return sorted(_own(root), key=is_test)


def _own(root: Path) -> Iterator[Path]:
    """Yield the repository's own Python files: none of virtual environments, build and hidden directories."""
    for path in sorted(root.rglob("*.py")):
        directories = path.relative_to(root).parts[:-1]
        if not _in_environment(root, directories) and not any(map(_is_foreign, directories)):
            yield path


def _in_environment(root: Path, directories: tuple[str, ...]) -> bool:
    """Tell whether any of these nested directories below the root is a virtual environment."""
    path = root
    for name in directories:
        path /= name
        if (path / "pyvenv.cfg").exists():
            return True
    return False


def _is_foreign(directory: str) -> bool:
    """Tell whether a directory of that name holds code that is not the repository's own."""
    return directory in _FOREIGN or directory.startswith(".")


def _can_be_installed(root: Path) -> bool:
    """Tell whether pip can install the repository."""
    return any((root / name).exists() for name in ("pyproject.toml", "setup.py", "setup.cfg"))


def _is_importable(module: str) -> bool:
    """Tell whether an import statement can name the module: ``train-gpt.py`` has no such name."""
    return all(part.isidentifier() and not keyword.iskeyword(part) for part in module.split("."))


def _imports(tree: ast.Module) -> Iterator[str]:
    """Yield the top-level names of the packages that a module imports; relative imports are left out."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name.partition(".")[0]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def _classes(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield (kind, name) for each subclass of a ``trainer`` or ``driver`` at the top level of a module."""
    imports_distcompat = "pytest_distcompat" in _imports(tree)
    trainers = set(_trainers(tree))
    for node in tree.body:
        if not isinstance(node, ast.ClassDef):
            continue
        bases = [ast.unparse(base) for base in node.bases]
        if not trainers.isdisjoint(bases):
            yield "trainer", node.name
        elif imports_distcompat and any(base.endswith("Driver") for base in bases):
            yield "driver", node.name


def _strategy_of_loop(tree: ast.Module) -> str:
    """Return the strategy of a module with a training loop, that is one that calls ``backward``.

    Returns:
        The strategy whose wrapper the module names, ``ddp`` if it names none; empty if it has no loop.
    """
    if not _calls_backward(tree):
        return ""
    names = set(_identifiers(tree))
    for wrapper, strategy in STRATEGY_OF.items():
        if wrapper in names:
            return strategy
    return "ddp"


def _calls_backward(tree: ast.Module) -> bool:
    """Tell whether a module calls a method ``backward`` of anything."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "backward"
        ):
            return True
    return False


def _identifiers(tree: ast.Module) -> Iterator[str]:
    """Yield the variables, attributes and imported names in a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.alias):
            yield node.name


def _trainers(tree: ast.Module) -> Iterator[str]:
    """Yield the names under which a module knows ``transformers.Trainer``; Lightning has a Trainer too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name == "transformers":
                    yield f"{alias.asname or alias.name}.Trainer"
        elif isinstance(node, ast.ImportFrom) and _is_from_transformers(node):
            for alias in node.names:
                if alias.name == "Trainer":
                    yield alias.asname or alias.name


def _is_from_transformers(node: ast.ImportFrom) -> bool:
    """Tell whether a ``from ... import`` names transformers, or a module of it."""
    module = node.module or ""
    return module.partition(".")[0] == "transformers"


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
