"""Output of subcommands: tables, files, and errors that name the file."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from pytest_distcompat.failures import UsageProblem
from pytest_distcompat.report.write import replace_file


@contextlib.contextmanager
def named_in_errors(name: object = None) -> Iterator[None]:
    """Turn an OSError of the block into a UsageProblem, whose message names the file, or what is given instead."""
    try:
        yield
    except OSError as error:
        raise UsageProblem(f"{name or error.filename}: {error.strerror}") from None


def write(path: Path, text: str) -> None:
    """Write a file. Raises UsageProblem."""
    with named_in_errors(path):
        replace_file(path, [text])


def table(heads: Sequence[str], rows: Iterable[Sequence[object]], indent: str = "  ") -> Iterator[str]:
    """Yield a line for the heads and one for each row, in columns of equal width."""
    lines = [list(heads), *([str(value) for value in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = (value.ljust(width) for value, width in zip(line, widths, strict=True))
        yield f"{indent}{'  '.join(cells)}".rstrip()
