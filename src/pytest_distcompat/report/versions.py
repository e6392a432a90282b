"""Which versions a run is about."""

from __future__ import annotations

import importlib.metadata
import platform

#: What is under test, and what tests it.
PACKAGES = ("pytest-distcompat", "torch", "accelerate", "transformers", "deepspeed", "pytest")


def versions(packages: tuple[str, ...] = PACKAGES) -> dict[str, str]:
    """Python's version and those of the packages that are installed, by their metadata: none of them is imported."""
    found = {"python": platform.python_version()}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
