"""Known upstream issues as data: versions that have them, cells that show them, messages."""

from pytest_distcompat.known.read import (
    IssueFile,
    KnownIssue,
    applying,
    concerned,
    concerning,
    read_file,
    shipped,
)

__all__ = ["IssueFile", "KnownIssue", "applying", "concerned", "concerning", "read_file", "shipped"]
