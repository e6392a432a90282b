"""Report files: JSON, HTML, Markdown and a short text for chat, all from one document.

A ``Report`` has the verdicts of a session. At the end of a session ``plugin.reporting.results``
calls ``write_report`` for each ``--distcompat-report FILE``, and ``append_summary`` if a step of a
GitHub workflow names a file for its summary. The commands ``distcompat merge`` and ``report`` call
``write_report`` too. The suffix of a file says its format.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from pytest_distcompat.report.document import Report
from pytest_distcompat.report.html import html
from pytest_distcompat.report.markdown import chat, markdown

#: Suffix of a file to the function that makes its text.
FORMATS: Mapping[str, Callable[[Report], str]] = {
    ".json": Report.to_text,
    ".md": markdown,
    ".html": html,
    ".txt": chat,
}

#: The longest summary of a step on GitHub, in bytes
#: (https://docs.github.com/en/actions/reference/workflows-and-actions/workflow-commands#step-isolation-and-limits).
MAX_SUMMARY = 1024 * 1024


def write_report(path: Path, report: Report) -> None:
    """Write the report in the format of the file's suffix.

    Raises:
        OSError: The file cannot be written.
    """
    if path.suffix == ".json":
        # The JSON of many verdicts is never in memory as a whole.
        replace_file(path, report.pieces())
    else:
        text = FORMATS[path.suffix](report)
        replace_file(path, [text])


def replace_file(path: Path, pieces: Iterable[str]) -> None:
    """Write the file atomically, by renaming a new file: nobody sees a part of it.

    Args:
        path: The file, which need not exist.
        pieces: The text in pieces.

    Raises:
        OSError: The file cannot be written; the error names it.
    """
    try:
        # Follow a link, as a write does.
        target = path.resolve()
        if _is_replaceable(target):
            _replace(target, pieces)
        else:
            with target.open("w", encoding="utf-8", errors="replace", newline="") as file:
                file.writelines(pieces)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _is_replaceable(target: Path) -> bool:
    """Tell whether a new file can take the place of the path.

    It cannot take that of a pipe or of /dev/stdout, and not in a directory that cannot be written,
    as where a single file is mounted into a container. These are written in place.
    """
    if not target.exists():
        return True
    return target.is_file() and os.access(target.parent, os.W_OK)


def _replace(target: Path, pieces: Iterable[str]) -> None:
    """Write a file beside the target, and rename it; remove it if that fails."""
    partial = target.with_name(f".{secrets.token_hex(8)}.part")
    try:
        _write_new(partial, pieces, like=target)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def _write_new(path: Path, pieces: Iterable[str], *, like: Path) -> None:
    """Write a new file to the disk, with the mode of ``like`` if that exists."""
    with path.open("x", encoding="utf-8", errors="replace", newline="") as file:
        file.writelines(pieces)
        file.flush()
        # Some file systems report only here that there was no space.
        os.fsync(file.fileno())
    if like.exists():
        shutil.copymode(like, path)


def append_summary(path: Path, report: Report) -> None:
    """Append the Markdown report to a step's summary on GitHub, cut to what GitHub shows.

    Args:
        path: The file that GitHub names, which may have text of earlier steps.
        report: The report.
    """
    raw = markdown(report).encode("utf-8", "replace")
    size = 0
    if path.exists():
        size = path.stat().st_size
    # 100 bytes are for the sentence at the end.
    room = max(0, MAX_SUMMARY - size - 100)
    if len(raw) > room:
        whole_lines, _, _ = raw[:room].rpartition(b"\n")
        raw = whole_lines + b"\n\nThe rest does not fit here: see the report's file.\n"
    with path.open("ab") as file:
        file.write(raw)
