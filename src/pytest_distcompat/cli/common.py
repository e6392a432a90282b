"""What several subcommands need: drivers by name, tables, and messages about files."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_distcompat.failures import UsageProblem
from pytest_distcompat.report import replace_file

if TYPE_CHECKING:
    from pytest_distcompat.driver import Driver


def named(name: str) -> type[Driver]:
    """Return a built-in driver or ``module:attribute``; modules of the working directory are found. Raises UsageProblem."""
    from pytest_distcompat.drivers import find_driver

    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    return find_driver(name)


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
        replace_file(path, text)


def table(heads: Sequence[str], rows: Iterable[Sequence[object]], indent: str = "  ") -> Iterator[str]:
    """Yield a line for the heads and one for each row, in columns of equal width."""
    lines = [list(heads), *([str(value) for value in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = (value.ljust(width) for value, width in zip(line, widths, strict=True))
        yield f"{indent}{'  '.join(cells)}".rstrip()
