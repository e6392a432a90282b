"""The training code of the installed libraries: which files of which packages reach looks at.

The tracer of each rank (``tracer``) and the analysis of their files (``collect``) use the same
list, and so does the reading of a change (``diffs``).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pytest_distcompat.installed import version_of


@dataclass(frozen=True)
class Library:
    """A library, and the part of its package that trains, saves and loads.

    Attributes:
        name: The package, such as ``accelerate``, which has the name of its distribution.
        parts: Patterns of files below the package's directory: ``runtime/**/*.py``.
        without: Directories below it that ranks of a trainer do not use.
    """

    name: str
    parts: tuple[str, ...]
    without: tuple[str, ...] = ()

    def files(self, directory: Path) -> Iterator[Path]:
        """Yield the files of the training code below the directory of a package.

        The package need not be installed.
        """
        left_out = [directory / name for name in self.without]
        paths: set[Path] = set()
        for part in self.parts:
            paths.update(directory.glob(part))
        for path in sorted(paths):
            if not any(path.is_relative_to(parent) for parent in left_out):
                yield path


#: Patterns and no list of files: a new release's new files count without a change here.
LIBRARIES = (
    Library("accelerate", ("**/*.py",), without=("commands", "test_utils")),
    Library(
        "transformers",
        ("trainer*.py", "training_args*.py", "integrations/**/*.py", "distributed/**/*.py"),
    ),
    Library("deepspeed", ("runtime/**/*.py", "checkpoint/**/*.py", "launcher/**/*.py")),
    Library(
        "torch",
        (
            "distributed/fsdp/**/*.py",
            "distributed/checkpoint/**/*.py",
            "distributed/tensor/**/*.py",
            "distributed/_composable/**/*.py",
        ),
    ),
    # The hooks by which adapters come into a model and out of a checkpoint; of the tuners, LoRA is
    # what cells train.
    Library("peft", ("*.py", "utils/**/*.py", "tuners/*.py", "tuners/lora/**/*.py")),
    # The hooks of FSDP2's gathers, and optimizers whose state is quantized.
    Library("torchao", ("float8/**/*.py", "optim/**/*.py")),
)
#: The name of a library -> the library.
BY_NAME: Mapping[str, Library] = {library.name: library for library in LIBRARIES}


@dataclass(frozen=True, order=True)
class FileId:
    """A file of a library, with a name that is the same on all machines.

    Attributes:
        library: The name of the library.
        path: The path below the package's directory: ``utils/other.py``.
    """

    library: str
    path: str

    def __str__(self) -> str:
        """Return both as one path."""
        return f"{self.library}/{self.path}"


def installed_libraries() -> dict[Library, Path]:
    """Return the installed libraries, each with the directory of its package; imports none."""
    directories: dict[Library, Path] = {}
    for library in LIBRARIES:
        spec = importlib.util.find_spec(library.name)
        if spec is not None and spec.submodule_search_locations:
            directory = Path(spec.submodule_search_locations[0])
            directories[library] = directory.resolve()
    return directories


def installed_files() -> dict[Path, FileId]:
    """Return the files of the installed libraries' training code, each with its name."""
    files: dict[Path, FileId] = {}
    for library, directory in installed_libraries().items():
        for path in library.files(directory):
            relative = path.relative_to(directory).as_posix()
            files[path.resolve()] = FileId(library.name, relative)
    return files


def installed_versions() -> dict[str, str]:
    """Return the release of each of the libraries that is installed."""
    versions: dict[str, str] = {}
    for library in LIBRARIES:
        version = version_of(library.name)
        if version:
            versions[library.name] = version
    return versions
