"""Corrupts a checkpoint, as a full disk or a lost file does."""

from __future__ import annotations

from pathlib import Path

from pytest_distcompat.probe.files import PICKLED
from pytest_distcompat.trace import FileInfo

#: Files that hold weights or optimizer state, by suffix; the others are settings and metadata.
HEAVY = PICKLED | {".safetensors", ".distcp"}


def corrupt(directory: Path, how: str) -> FileInfo:
    """Do ``how`` to the file with the most in it: ``truncate`` it to half, or ``remove`` it. Which file it was.

    Raises FileNotFoundError where nothing is saved.
    """
    heavy = (path for path in directory.rglob("*") if path.suffix in HEAVY)
    files = sorted(heavy, key=lambda path: (path.stat().st_size, path))
    if not files:
        raise FileNotFoundError(f"{directory}: there is no checkpoint to spoil")
    largest = files[-1]
    if how == "remove":
        largest.unlink()
    else:
        with largest.open("r+b") as file:
            file.truncate(largest.stat().st_size // 2)
    return FileInfo(str(largest.relative_to(directory)), "", how, ())
