"""Known upstream issues as data: the versions that have them, the cells that show them, their messages."""

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
