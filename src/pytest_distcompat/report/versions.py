"""Which versions a run is about."""

from __future__ import annotations

import platform

from pytest_distcompat.installed import version_of

#: What is under test, and what tests it.
PACKAGES = ("pytest-distcompat", "torch", "accelerate", "transformers", "deepspeed", "pytest")


def versions(packages: tuple[str, ...] = PACKAGES) -> dict[str, str]:
    """Python's version and those of the packages that are installed, by their metadata: none of them is imported."""
    there = {name: version_of(name) for name in packages}
    return {"python": platform.python_version(), **{name: version for name, version in there.items() if version}}
