"""Corruption of a checkpoint, as by a full disk or a lost file.

``worker`` calls ``corrupt`` on rank 0 for the action ``damage`` of a run. After ``truncate`` and
``remove`` the run loads the checkpoint: the check ``damage`` demands that the trainer raises an
error that names the file, instead of training on with whatever it has read. After ``block`` the run
builds a trainer that saves there: the check ``paths`` demands an error that names the directory.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path, PurePath

from pytest_distcompat.probe.files import PICKLED
from pytest_distcompat.trace import FileInfo

#: Suffixes of files that hold weights or optimizer state; the others hold settings and metadata.
TENSOR_SUFFIXES = PICKLED | {".safetensors", ".distcp"}


def _any_file(_path: PurePath) -> bool:
    """Tell that a file is loaded."""
    return True


def corrupt(
    directory: Path, how: str, is_loaded: Callable[[PurePath], bool] = _any_file
) -> FileInfo:
    """Corrupt the largest file of a checkpoint, or its directory.

    Args:
        directory: The directory of the checkpoint.
        how: ``truncate`` cuts the largest file to half its size; ``remove`` deletes it; ``block``
            replaces the directory, which must be empty, by a file: then not even root can write to
            it.
        is_loaded: Tells of the path of a file in the directory whether a load reads that file. No
            other is corrupted.

    Returns:
        The path that was corrupted, with ``how`` in its field ``holds``. No file is read for it,
        so its format and keys are empty.

    Raises:
        FileNotFoundError: If no file that is loaded has weights or optimizer state.
    """
    if how == "block":
        directory.rmdir()
        directory.touch()
        return FileInfo(directory.name, format="", holds=how, keys=())
    candidates: list[Path] = []
    for path in directory.rglob("*"):
        if path.suffix in TENSOR_SUFFIXES and is_loaded(path.relative_to(directory)):
            candidates.append(path)
    files = sorted(candidates, key=lambda path: (path.stat().st_size, path))
    if not files:
        raise FileNotFoundError(f"{directory}: there is no checkpoint to corrupt")
    largest = files[-1]
    if how == "remove":
        largest.unlink()
    else:
        with largest.open("r+b") as file:
            file.truncate(largest.stat().st_size // 2)
    return FileInfo(str(largest.relative_to(directory)), format="", holds=how, keys=())
