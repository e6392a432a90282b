"""The report files: JSON for machines, HTML and Markdown for people, a short text for chat; all from one document."""

from __future__ import annotations

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
    """Write the file in the format of its suffix. Raises KeyError for a suffix that is not in FORMATS."""
    path.write_text(FORMATS[path.suffix](report), encoding="utf-8", errors="replace")


def append_summary(path: Path, report: Report) -> None:
    """Append the Markdown to a step's summary on GitHub; the end is left out where the whole is too long to be taken."""
    raw = markdown(report).encode("utf-8", "replace")
    already = path.stat().st_size if path.exists() else 0
    room = SUMMARY - already - 100
    if len(raw) > room:
        raw = raw[: max(0, room)].rpartition(b"\n")[0] + b"\n\nThe rest does not fit here: see the report's file.\n"
    with path.open("ab") as file:
        file.write(raw)
