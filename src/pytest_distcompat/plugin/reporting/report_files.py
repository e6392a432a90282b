"""Parsers of the options that name report files: ``--distcompat-report`` and ``--distcompat-baseline``."""

from __future__ import annotations

import functools
from pathlib import Path

from pytest_distcompat.failures import UsageProblem
from pytest_distcompat.report import FORMATS, Report


def paths_to_write(text: str, base: Path) -> tuple[Path, ...]:
    """Return the paths of report files, one for each line, relative to ``base``.

    Raises:
        UsageProblem: A suffix is no known format, or a file cannot be written there.
    """
    paths = tuple(base / line.strip() for line in dict.fromkeys(text.splitlines()) if line.strip())
    for path in paths:
        if path.suffix not in FORMATS:
            raise UsageProblem(f"{str(path)!r}: the suffix says the format. Known: {', '.join(FORMATS)}.")
        if not path.absolute().parent.is_dir():
            raise UsageProblem(f"{str(path)!r}: there is no directory {path.absolute().parent}.")
        if path.is_dir():
            raise UsageProblem(f"{str(path)!r} is a directory; expected a file.")
    return paths


def read_baseline(text: str, base: Path) -> Report | None:
    """Return the report in that file; None for an empty text. Raises UsageProblem if the file has no report."""
    return _read((base / text).absolute()) if text else None


@functools.cache
def _read(path: Path) -> Report:
    """Read a report. Cached: this session may write to the same file at its end."""
    return Report.read(path)
