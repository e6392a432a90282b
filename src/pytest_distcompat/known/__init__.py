"""Known issues: upstream bugs as data, for which a failure is expected where they are installed.

``issue`` has what one issue says, ``read`` reads issues from TOML files, ``choice`` chooses those
that concern a driver on the installed packages.
"""

from pytest_distcompat.known.choice import applying, concerning, is_about_driver, names_in_issues
from pytest_distcompat.known.issue import KnownIssue
from pytest_distcompat.known.read import IssueFile, read_file, shipped

__all__ = [
    "IssueFile",
    "KnownIssue",
    "applying",
    "concerning",
    "is_about_driver",
    "names_in_issues",
    "read_file",
    "shipped",
]
