"""Known upstream issues as data: the versions that have them, the cells that show them, their messages."""

from pytest_distcompat.known.read import (
    KnownIssue,
    applying,
    concerned,
    concerning,
    read_file,
    shipped,
)

__all__ = ["KnownIssue", "applying", "concerned", "concerning", "read_file", "shipped"]
