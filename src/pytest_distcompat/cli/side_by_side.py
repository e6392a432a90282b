"""Other releases of packages beside the installed ones: each in a directory of its own, which comes first on PYTHONPATH."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from pytest_distcompat.failures import UsageProblem

#: Never fetched for another package's sake: it pulls gigabytes, and all that is compiled against it would have to change too.
KEPT = ("torch",)
#: How often what was just installed may need more.
ROUNDS = 5


def requirements(release: str) -> list[Requirement]:
    """What ``transformers==4.57.6,accelerate==1.12.0`` asks for. Raises UsageProblem for what names no single release."""
    found = []
    for text in release.split(","):
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            raise UsageProblem(f"{text!r} is no release of a package; expected: transformers==4.57.6") from None
        pins = [pin for pin in requirement.specifier if pin.operator == "==" and "*" not in pin.version]
        if len(pins) != 1:
            raise UsageProblem(f"{text}: which release? Expected: {requirement.name}==1.2.3")
        found.append(requirement)
    return found


def install(release: str, directory: Path) -> Path:
    """The directory of these releases, and of what they need and what is installed does not fulfil; made if it is not there.

    Raises UsageProblem with pip's last words.
    """
    wanted = [str(requirement) for requirement in requirements(release)]
    target = directory / release
    if not target.is_dir():
        # Half an installation would be taken for a whole one the next time.
        partial = directory / f".{release}.{os.getpid()}"
        _pip(wanted, partial)
        for _ in range(ROUNDS):
            more = sorted(set(unmet(partial)))
            if not more:
                break
            _pip(more, partial)
        partial.rename(target)
    return target


def unmet(target: Path) -> Iterator[str]:
    """What the distributions in the directory require, and neither it nor the environment has."""
    there = {
        canonicalize_name(found.name): found.version
        for path in ([*sys.path], [str(target)])
        for found in importlib.metadata.distributions(path=path)
    }
    for distribution in importlib.metadata.distributions(path=[str(target)]):
        for text in distribution.requires or ():
            requirement = Requirement(text)
            name = canonicalize_name(requirement.name)
            if name in KEPT or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
                continue
            if name not in there or not requirement.specifier.contains(there[name], prereleases=True):
                yield f"{requirement.name}{requirement.specifier}"


def environment(target: Path) -> dict[str, str]:
    """The variables under which Python finds what is in the directory first."""
    paths = [str(target), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def _pip(wanted: Sequence[str], target: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--upgrade",
    ]
    done = subprocess.run([*command, "--target", str(target), *wanted], capture_output=True, text=True, check=False)
    if done.returncode:
        told = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        raise UsageProblem(f"pip cannot install {', '.join(wanted)}: {' '.join(told[-2:])}")
