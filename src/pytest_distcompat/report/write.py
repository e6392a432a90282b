"""The report files: JSON for machines, HTML and Markdown for people, a short text for chat; all from one document."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from pytest_distcompat.report.document import Report
from pytest_distcompat.report.html import html
from pytest_distcompat.report.markdown import chat, markdown

#: Suffix of the file to what makes its text.
FORMATS: Mapping[str, Callable[[Report], str]] = {
    ".json": Report.to_text,
    ".md": markdown,
    ".html": html,
    ".txt": chat,
}

#: What a step's summary on GitHub may have, in bytes
#: (https://docs.github.com/en/actions/reference/workflows-and-actions/workflow-commands#step-isolation-and-limits).
SUMMARY = 1024 * 1024


def write_report(path: Path, report: Report) -> None:
    """Write the file in the format of its suffix. Raises KeyError for a suffix that is not in FORMATS.

    Raises OSError where it cannot be written; what was there before is there still.
    """
    replace_file(path, FORMATS[path.suffix](report))


def replace_file(path: Path, text: str) -> None:
    """Write the file as a whole or not at all: beside it, then by renaming. Raises OSError, which names the file."""
    data = text.encode("utf-8", "replace")
    try:
        # A link is followed, as it is when a file is written.
        target = path.resolve()
        if target.exists() and not (target.is_file() and os.access(target.parent, os.W_OK)):
            # A pipe, /dev/stdout, or a file alone in a container: nothing can take its place.
            target.write_bytes(data)
            return
        beside = target.with_name(f".{secrets.token_hex(8)}.part")
        try:
            _write_new(beside, data, like=target)
            beside.replace(target)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _write_new(path: Path, data: bytes, *, like: Path) -> None:
    """Write a new file, down to the disk, with the mode of another one if that is there."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        # Some file systems tell only now that there was no space.
        os.fsync(file.fileno())
    if like.exists():
        shutil.copymode(like, path)


def append_summary(path: Path, report: Report) -> None:
    """Append the Markdown to a step's summary on GitHub; the end is left out where the whole is too long to be taken."""
    raw = markdown(report).encode("utf-8", "replace")
    already = path.stat().st_size if path.exists() else 0
    room = SUMMARY - already - 100
    if len(raw) > room:
        raw = raw[: max(0, room)].rpartition(b"\n")[0] + b"\n\nThe rest does not fit here: see the report's file.\n"
    with path.open("ab") as file:
        file.write(raw)
