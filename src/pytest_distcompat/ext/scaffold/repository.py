"""Inspection of a repository for ``distcompat init``: its tests, its pytest settings, its trainer.

``command`` calls ``inspect_repository(root)`` and gets a ``Repository``. Files are only read, as
text or by their syntax tree: nothing of the repository is imported or run. A *driver* is a class by
which this plugin builds and calls a trainer. The files that init writes depend on whether the
repository has one already, a subclass of transformers' Trainer, or a training loop in plain torch.
"""

from __future__ import annotations

import ast
import contextlib
import keyword
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pytest_distcompat.ext.scaffold.pytest_settings import Settings, relative, settings_of

#: Library -> the built-in driver for it. A library comes before those that it is built on, because
#: the first one that the repository imports counts.
DRIVERS = {
    "transformers": "trainer",
    "accelerate": "accelerate",
    "deepspeed": "deepspeed",
    "torch": "torch",
}
#: Function or class that wraps a model -> the strategy.
STRATEGY_OF = {
    "fully_shard": "fsdp2",
    "FullyShardedDataParallel": "fsdp1",
    "DistributedDataParallel": "ddp",
}
#: Directories whose code is not the repository's own.
_FOREIGN = {"node_modules", "build", "dist", "site-packages", "docs"}


@dataclass(frozen=True)
class Class:
    """A class of the repository, as an import statement names it.

    Attributes:
        module: The dotted name of the module.
        name: The class.
        top: The directory that must be on ``sys.path``, relative to the repository's root: ``src``.
    """

    module: str
    name: str
    top: Path = Path()


@dataclass(frozen=True)
class Repository:
    """Facts about a repository. Of several classes of a kind, one outside the tests is preferred.

    Attributes:
        root: The repository's directory. Other paths are relative to it.
        tests: The directory of the tests.
        settings: The settings of pytest.
        imports: The libraries of ``DRIVERS`` that any file imports.
        driver: The first subclass of ``Driver``.
        trainer: The first subclass of ``transformers.Trainer``.
        loop: The first module with a training loop; its ``name`` is the strategy of the loop.
        nameless: Messages about classes in files that no import statement can name:
            ``train-gpt.py: no import can name that file, so MyTrainer has no driver``.
        on_github: Whether the repository is hosted on GitHub.
        importlib_mode: Whether pytest imports tests with ``--import-mode=importlib``.
        installs: Whether pip can install the repository.
        pythonpath: The directories that pytest already puts on ``sys.path``.
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
    """What the Python files of a repository contain; ``add`` collects it file by file."""

    #: The repository's directory.
    root: Path
    #: The directory of the tests, relative to it.
    tests: Path
    #: The libraries of ``DRIVERS`` that any file imports.
    imports: set[str] = field(default_factory=set)
    #: ``driver``, ``trainer`` or ``loop`` -> the first class of that kind. Of a loop the ``name``
    #: is its strategy.
    classes: dict[str, Class] = field(default_factory=dict)
    #: Messages about classes in files that no import statement can name.
    nameless: list[str] = field(default_factory=list)

    def add(self, path: Path) -> None:
        """Add what a file contains.

        Raises:
            OSError, SyntaxError, ValueError, RecursionError: If the file cannot be parsed.
        """
        tree = ast.parse(path.read_text(encoding="utf-8"))
        self.imports |= set(_imports(tree)) & set(DRIVERS)
        # Only the first class of a kind is kept (``setdefault``).
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
    """Inspect a repository by reading its files; nothing is imported or run.

    Raises:
        UsageProblem: If pytest's settings cannot be read.
    """
    settings = settings_of(root)
    settings_directory = relative(settings.file.parent, root)
    tests = _tests_directory(root, settings, settings_directory)
    inspection = _Inspection(root, tests)
    for path in _own_files_tests_last(root, tests):
        # Skip dangling links, directories named *.py and files that are not valid Python.
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
    """Return the directory of the tests, relative to the root; ``tests`` if none exists.

    Args:
        root: The repository's directory.
        settings: pytest's settings.
        settings_directory: Where these stand, relative to the root; ``..`` if above it.
    """
    candidates = ["tests", "test"]
    # Settings found in a directory above the root name the tests of that directory.
    if settings_directory == Path():
        candidates = [*settings.listed("testpaths"), *candidates]
    for name in candidates:
        if (root / name).is_dir():
            return Path(name)
    return Path("tests")


def _own_files_tests_last(root: Path, tests: Path) -> list[Path]:
    """Return the repository's own Python files.

    Tests come last, because a class there may be a test double.
    """

    def is_test(path: Path) -> bool:
        return tests in path.relative_to(root).parents

    return sorted(_own_files(root), key=is_test)


def _own_files(root: Path) -> Iterator[Path]:
    """Yield the Python files outside virtual environments, build and hidden directories."""
    for path in sorted(root.rglob("*.py")):
        directories = path.relative_to(root).parts[:-1]
        is_foreign = any(_is_foreign(directory) for directory in directories)
        if not is_foreign and not _in_environment(root, directories):
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
    """Tell whether an import statement can name the module, as none can name ``train-gpt.py``."""
    for part in module.split("."):
        if not part.isidentifier() or keyword.iskeyword(part):
            return False
    return True


def _imports(tree: ast.Module) -> Iterator[str]:
    """Yield the top-level packages that a module imports; relative imports are left out."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name.partition(".")[0]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def _classes(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield (kind, name) of each ``trainer`` or ``driver`` class at the top level of a module."""
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
    """Return the strategy of a module's training loop, which is a module that calls ``backward``.

    Returns:
        The strategy whose wrapper the module names; ``ddp`` if it names none; empty without a loop.
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
    """Yield the names by which a module's code refers to ``transformers.Trainer``.

    The import decides, because other libraries, such as Lightning, have a ``Trainer`` too.
    """
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
    """Return a file's dotted module name, and the directory that must be on ``sys.path`` for it.

    For example ``("trainers.sft", Path("src"))`` for ``src/trainers/sft.py``.
    """
    # The first directory above the file that is no package.
    top = path.parent
    while (top / "__init__.py").exists() and top != root:
        top = top.parent
    # pytest imports tests that are a package from the root.
    is_test = tests in path.relative_to(root).parents
    if is_test and (root / tests / "__init__.py").exists():
        top = root
    parts = path.relative_to(top).with_suffix("").parts
    module = ".".join(parts).removesuffix(".__init__")
    return module, top.relative_to(root)


def _remote_is_github(root: Path) -> bool:
    """Tell whether git's configuration of the repository names GitHub, as the url of a remote."""
    config = root / ".git" / "config"
    return config.is_file() and "github.com" in config.read_text(encoding="utf-8", errors="replace")
