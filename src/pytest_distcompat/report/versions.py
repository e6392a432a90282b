"""Versions of the packages that a session tests."""

from __future__ import annotations

import platform

from pytest_distcompat.installed import version_of

#: The packages under test, and those that test them.
PACKAGES = ("pytest-distcompat", "torch", "accelerate", "transformers", "deepspeed", "pytest")


def versions(packages: tuple[str, ...] = PACKAGES) -> dict[str, str]:
    """Return the versions of Python and of the installed packages, from metadata: none is imported."""
    installed = {name: version_of(name) for name in packages}
    return {"python": platform.python_version(), **{name: version for name, version in installed.items() if version}}
