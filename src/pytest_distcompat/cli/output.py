"""Output of the subcommands of ``distcompat``: tables, files, and errors that name the file.

Subcommands of extensions use it too. A ``UsageProblem`` is an error of the user's, which
``cli.main`` prints in one line.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from pytest_distcompat.failures import UsageProblem
from pytest_distcompat.report.document import Report
from pytest_distcompat.report.write import FORMATS, replace_file, write_report

#: The help of an option that names a report's file.
WRITTEN = f"written in the format of its suffix ({', '.join(FORMATS)}); may be given several times"


def report_file(text: str) -> Path:
    """Return the path of a report's file: a ``type`` for argparse's ``add_argument``.

    Raises:
        argparse.ArgumentTypeError: Its suffix is that of no format.
    """
    path = Path(text)
    if path.suffix not in FORMATS:
        raise argparse.ArgumentTypeError(
            f"{text!r}: the suffix says the format. Known: {', '.join(FORMATS)}"
        )
    return path


@contextlib.contextmanager
def named_in_errors(name: object = None) -> Iterator[None]:
    """Turn an OSError of the block into a UsageProblem: ``last.json: No such file or directory``.

    Its message names the file of the error, or ``name`` if that is given.
    """
    try:
        yield
    except OSError as error:
        raise UsageProblem(f"{name or error.filename}: {error.strerror}") from None


def write(path: Path, text: str) -> None:
    """Write a file; raise UsageProblem if that fails."""
    with named_in_errors(path):
        replace_file(path, [text])


def write_reports(paths: Iterable[Path], report: Report) -> None:
    """Write a report to each file, in the format of its suffix; raise UsageProblem on failure."""
    for path in paths:
        with named_in_errors(path):
            write_report(path, report)


def table(
    heads: Sequence[str], rows: Iterable[Sequence[object]], indent: str = "  "
) -> Iterator[str]:
    """Yield a line for the heads and one for each row, with the columns aligned.

    Args:
        heads: The heads of the columns.
        rows: The values of each row, which become texts.
        indent: What each line begins with.
    """
    lines = [list(heads)]
    for row in rows:
        lines.append(list(map(str, row)))
    widths = []
    for column in zip(*lines, strict=True):
        widths.append(max(map(len, column)))
    for line in lines:
        padded = []
        for value, width in zip(line, widths, strict=True):
            padded.append(value.ljust(width))
        yield f"{indent}{'  '.join(padded)}".rstrip()


def columns() -> int:
    """Return how many characters a line may have; 0 if the output is a file, which has no width."""
    if sys.stdout.isatty() or "COLUMNS" in os.environ:
        return shutil.get_terminal_size().columns
    return 0


def fitted(line: str, width: int) -> str:
    """Return the line, cut if it has more than ``width`` characters; 0 stands for any width."""
    if not width or len(line) <= width:
        return line
    return f"{line[: width - 4]} ..."
