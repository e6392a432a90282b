"""Which release of a package is installed, and whether it fulfils a requirement; nothing is imported to find out."""

from __future__ import annotations

import importlib.metadata
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from packaging.requirements import Requirement


def version_of(package: str, path: list[str] | None = None) -> str | None:
    """The version that Python would import, from these directories if they are given; None if there is none."""
    found = next(iter(importlib.metadata.distributions(name=package, path=sys.path if path is None else path)), None)
    return None if found is None else found.version


def fits(requirement: Requirement, version: str | None) -> bool:
    """Whether it asks for that version. A local build (2.13.0+cpu) and a nightly are what their number says."""
    return version is not None and requirement.specifier.contains(version.partition("+")[0], prereleases=True)
