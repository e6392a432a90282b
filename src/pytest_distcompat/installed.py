"""Installed releases of packages, read from metadata without an import, and the C++ compiler."""

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
    """Return the version that Python would import, from these directories if given; None if there is none."""
    found = next(
        iter(
            importlib.metadata.distributions(name=package, path=sys.path if path is None else path)
        ),
        None,
    )
    return None if found is None else found.version


def fits(requirement: Requirement, version: str | None) -> bool:
    """Tell whether the version meets the requirement. Local builds (2.13.0+cpu) and nightlies count by their number."""
    return version is not None and requirement.specifier.contains(
        version.partition("+")[0], prereleases=True
    )


#: The packages under test, and those that test them.
PACKAGES = ("pytest-distcompat", "torch", "accelerate", "transformers", "deepspeed", "pytest")


def versions(packages: tuple[str, ...] = PACKAGES) -> dict[str, str]:
    """Return the versions of Python and of the installed packages, from metadata: none is imported."""
    installed = {name: version_of(name) for name in packages}
    return {
        "python": platform.python_version(),
        **{name: version for name, version in installed.items() if version},
    }


#: How to get a torch: by default pip brings one for CUDA, of some gigabytes.
GET_TORCH = "pip install torch; without a GPU: pip install torch --index-url https://download.pytorch.org/whl/cpu"


def has_compiler() -> bool:
    """Tell whether there is a C++ compiler, for inductor and for DeepSpeed's offload."""
    return any(map(shutil.which, filter(None, (os.environ.get("CXX"), "g++", "c++", "clang++"))))
