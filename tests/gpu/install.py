"""Install wheels into a directory, without a network, where the machine's own packages do not do.

``python tests/gpu/install.py WHEELS SITE``: of the wheels in one directory those are installed into the other whose package
the machine lacks, or has in a version that another of the wheels does not accept. Ours always is.
"""

from __future__ import annotations

import email
import importlib.metadata
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

# Not the machine's own, which it may lack.
from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.utils import canonicalize_name

OURS = "pytest-distcompat"


@dataclass(frozen=True)
class Wheel:
    """A wheel, its package, and what that requires."""

    path: Path
    name: str
    requires: tuple[Requirement, ...]


def read(path: Path) -> Wheel:
    """Read the metadata of a wheel."""
    with zipfile.ZipFile(path) as archive:
        inside = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(inside))
    needs = map(Requirement, metadata.get_all("Requires-Dist", ()))
    # Of extras nothing is asked for.
    unconditional = tuple(need for need in needs if need.marker is None or need.marker.evaluate({"extra": ""}))
    return Wheel(path, canonicalize_name(metadata["Name"]), unconditional)


def needed(wheels: Iterable[Wheel], installed: Mapping[str, str]) -> Iterator[Wheel]:
    """Yield the wheels that the machine needs.

    Args:
        wheels: Those that there are.
        installed: The machine's packages and their versions.
    """
    wheels = list(wheels)
    required = [requirement for wheel in wheels for requirement in wheel.requires]
    for wheel in wheels:
        version = installed.get(wheel.name)
        specifiers = [
            requirement.specifier for requirement in required if canonicalize_name(requirement.name) == wheel.name
        ]
        fits = version is not None and all(specifier.contains(version, prereleases=True) for specifier in specifiers)
        if wheel.name == OURS or not fits:
            yield wheel


def main() -> None:
    """Install."""
    source, site = map(Path, sys.argv[1:])
    wheels = [read(path) for path in sorted(source.glob("*.whl"))]
    if OURS not in {wheel.name for wheel in wheels}:
        raise SystemExit(f"{source} has no wheel of {OURS}: run tests/gpu/wheels.sh where there is a network")
    installed: dict[str, str] = {
        canonicalize_name(distribution.metadata["Name"]): distribution.version
        for distribution in importlib.metadata.distributions()
    }
    chosen = list(needed(wheels, installed))
    print("installing", ", ".join(wheel.path.name for wheel in chosen), flush=True)
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
        "--no-compile",
        "--upgrade",
    ]
    options = ["--disable-pip-version-check", "--no-cache-dir", "--root-user-action=ignore", "--target", str(site)]
    subprocess.run([*command, *options, *(str(wheel.path) for wheel in chosen)], check=True)


if __name__ == "__main__":
    main()
