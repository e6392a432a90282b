"""A mutant is an installed package with the fix of one upstream bug taken out, in a copy that PYTHONPATH puts first."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from dataclasses import dataclass
from pathlib import Path

#: Stand-ins for packages that need a GPU, to be put on PYTHONPATH for the mutants that say so.
STAND_IN = Path(__file__).parent / "stand_in"


@dataclass(frozen=True)
class Edit:
    """One replacement in one installed file, named relative to site-packages."""

    file: str
    old: str
    new: str
    count: int = 1

    @property
    def package(self) -> str:
        """The top-level package, which is what gets copied."""
        return self.file.partition("/")[0]


@dataclass(frozen=True)
class Sighting:
    """Where our suite sees the mutant: a driver and a check in one cell, and what the check says there."""

    driver: str
    cell: str
    check: str
    match: str


@dataclass(frozen=True)
class Mutant:
    """One upstream bug as the edits that bring it back.

    With ``stand_in`` the run needs ``STAND_IN`` on its path, the sound one as much as this one.
    """

    id: str
    upstream: tuple[str, ...]
    symptom: str
    edits: tuple[Edit, ...]
    stand_in: bool = False


class UpstreamChangedError(Exception):
    """The installed source is no longer the one that an edit was written for."""


def installed(package: str) -> Path:
    """Where the package lies. It is not imported: that would cost seconds and would keep the copy from being used."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"{package} is not installed as a package with files")
    return Path(spec.submodule_search_locations[0])


def edited(mutant: Mutant) -> dict[str, str]:
    """The new text of each file that the mutant edits, by its name relative to site-packages."""
    texts: dict[str, str] = {}
    for edit in mutant.edits:
        if edit.file not in texts:
            path = installed(edit.package).parent / edit.file
            if not path.is_file():
                raise UpstreamChangedError(f"{mutant.id}: {edit.file} is gone from {_version(edit.package)}")
            texts[edit.file] = path.read_text(encoding="utf-8")
        count = texts[edit.file].count(edit.old)
        if count != edit.count:
            raise UpstreamChangedError(
                f"{mutant.id}: {edit.file} of {_version(edit.package)} holds this text {count} times, "
                f"the edit was written for {edit.count}:\n{edit.old}"
            )
        texts[edit.file] = texts[edit.file].replace(edit.old, edit.new)
    return texts


def mutated_copy(mutant: Mutant, directory: Path) -> Path:
    """Lay the mutated packages out in ``directory``, to be put first on PYTHONPATH; returns the directory.

    Directories are real, so whatever Python or the package writes beside its files (bytecode above all) stays in the
    copy. Files are symlinks: a shared library is then looked up in the copy, where its neighbours are linked too.
    """
    texts = edited(mutant)
    for package in sorted({edit.package for edit in mutant.edits}):
        _link(installed(package), directory / package, package, texts)
    return directory


def _link(source: Path, target: Path, name: str, texts: dict[str, str]) -> None:
    target.mkdir(parents=True)
    for entry in source.iterdir():
        inner = f"{name}/{entry.name}"
        if entry.is_dir():
            _link(entry, target / entry.name, inner, texts)
        elif inner in texts:
            (target / entry.name).write_text(texts[inner], encoding="utf-8")
        elif not _is_stale(inner, texts):
            (target / entry.name).symlink_to(entry)


def _is_stale(name: str, texts: dict[str, str]) -> bool:
    """Is it the bytecode of an edited module? Python would throw it away, unless source and copy share time and size."""
    folder, _, file = name.rpartition("/")
    parent, _, cache = folder.rpartition("/")
    return cache == "__pycache__" and f"{parent}/{file.partition('.')[0]}.py" in texts


def _version(package: str) -> str:
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return package
