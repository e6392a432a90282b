"""Installed releases of packages, read from metadata without an import, and the C++ compiler.

pytest's process must not import torch or transformers: that takes seconds. It reads their versions
from the metadata of the installed packages, to choose default models, for reports, and to find out
which known upstream issues apply. ``distcompat doctor`` prints them.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from packaging.requirements import Requirement


def version_of(package: str, path: list[str] | None = None) -> str | None:
    """Return the version of the package that Python would import; None if it is not installed.

    Args:
        package: The name of the distribution.
        path: The directories to search instead of ``sys.path``.
    """
    directories = sys.path if path is None else path
    # The first distribution hides later ones, as in an import.
    for distribution in importlib.metadata.distributions(name=package, path=directories):
        return distribution.version
    return None


def fits(requirement: Requirement, version: str | None) -> bool:
    """Tell whether the version meets the requirement; None, which is not installed, meets none.

    A local build, 2.13.0+cpu, counts as its release. A nightly, 2.14.0.dev20261101, meets
    ``>=2.13``, but not ``>=2.14``: it comes before that release.
    """
    if version is None:
        return False
    number = version.partition("+")[0]
    return requirement.specifier.contains(number, prereleases=True)


#: The packages under test, and those that test them.
PACKAGES = ("pytest-distcompat", "torch", "accelerate", "transformers", "deepspeed", "pytest")


def versions(packages: tuple[str, ...] = PACKAGES) -> dict[str, str]:
    """Return the versions of Python and of the installed packages, without importing them."""
    installed = {"python": platform.python_version()}
    for name in packages:
        version = version_of(name)
        if version:
            installed[name] = version
    return installed


#: How to install torch. By default pip installs the build for CUDA, of some gigabytes.
GET_TORCH = "pip install torch; without a GPU: pip install torch --index-url https://download.pytorch.org/whl/cpu"


def has_compiler() -> bool:
    """Tell whether there is a C++ compiler, which inductor and DeepSpeed's offload need."""
    for name in (os.environ.get("CXX"), "g++", "c++", "clang++"):
        if name and shutil.which(name):
            return True
    return False
