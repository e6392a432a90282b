"""What the options say that name report files."""

from __future__ import annotations

import functools
from pathlib import Path

from pytest_distcompat.failures import UsageProblem
from pytest_distcompat.report import FORMATS, Report


def to_write(text: str, base: Path) -> tuple[Path, ...]:
    """A path a line, below ``base``. Raises UsageProblem for a suffix that is no format, and where no file can be."""
    paths = tuple(base / line.strip() for line in dict.fromkeys(text.splitlines()) if line.strip())
    for path in paths:
        if path.suffix not in FORMATS:
            raise UsageProblem(f"{str(path)!r}: the suffix says the format. Known: {', '.join(FORMATS)}.")
        if not path.absolute().parent.is_dir():
            raise UsageProblem(f"{str(path)!r}: there is no directory {path.absolute().parent}.")
        if path.is_dir():
            raise UsageProblem(f"{str(path)!r} is a directory; expected a file.")
    return paths


def to_compare_with(text: str, base: Path) -> Report | None:
    """The report in that file. Raises UsageProblem if there is none."""
    return _read((base / text).absolute()) if text else None


@functools.cache
def _read(path: Path) -> Report:
    """Read once, before this run may write to the same file."""
    return Report.read(path)
