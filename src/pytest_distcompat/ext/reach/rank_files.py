"""The files in which the tracers of ranks write which lines they executed.

``tracer`` writes the file of its rank, ``collect`` reads those of all ranks of a run.
"""

from __future__ import annotations

from pathlib import Path

from pytest_distcompat.launch.files import recorded_file, recorded_files

#: Part of the files' names: ``recorded-reach-0.json``.
_EXTENSION = "reach"


def reach_file(run: Path, rank: int) -> Path:
    """Return the file with what that rank of a suite executed."""
    return recorded_file(run, _EXTENSION, rank)


def reach_files(run: Path) -> list[Path]:
    """Return those files of all ranks of a run; none where nothing is traced."""
    return recorded_files(run, _EXTENSION)
