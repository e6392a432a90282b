"""Known upstream issues as data: which versions have them, where they show, how they read."""

from pytest_distcompat.known.read import KnownIssue, applying, concerned, concerning, read_entries, read_file, shipped

__all__ = ["KnownIssue", "applying", "concerned", "concerning", "read_entries", "read_file", "shipped"]
