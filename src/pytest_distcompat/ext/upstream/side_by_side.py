"""Installation of other releases, each in a directory that comes first on PYTHONPATH."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from pytest_distcompat.failures import UsageProblem
from pytest_distcompat.installed import fits, version_of

#: Packages that are never installed as a requirement of another: torch takes gigabytes, and packages compiled against it
#: would have to change too.
PACKAGES_KEPT = ("torch",)
#: How many times newly installed packages may require further ones.
MAX_ROUNDS = 5
#: The end of a URL that always names the same sources.
_COMMIT = re.compile(r"@[0-9a-f]{40}$")


def requirements(release: str) -> list[Requirement]:
    """Parse ``transformers==4.57.6,accelerate==1.12.0`` or ``transformers @ git+https://...``. Raises UsageProblem."""
    found = []
    for text in release.split(","):
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            raise UsageProblem(f"{text!r} is no release of a package; expected: transformers==4.57.6") from None
        pins = [pin for pin in requirement.specifier if pin.operator == "==" and "*" not in pin.version]
        if len(pins) != 1 and not requirement.url:
            expected = f"{requirement.name}==1.2.3 or {requirement.name} @ git+https://..."
            raise UsageProblem(f"{text}: which release? Expected: {expected}")
        found.append(requirement)
    return found


def file_name(release: str) -> str:
    """Return the name of a release's directory and files."""
    return re.sub(r"[^\w.=+,-]+", "-", release)


def install(release: str, directory: Path) -> Path:
    """Return the directory with these releases and what they require beyond the installed packages; make it if needed.

    One from a URL that names no commit, or that no longer meets its requirements, is installed again. Raises UsageProblem
    if pip fails.
    """
    wanted = requirements(release)
    target = directory / file_name(release)
    moves = any(requirement.url and not _COMMIT.search(requirement.url) for requirement in wanted)
    if moves or (target.is_dir() and any(unmet(target))):
        shutil.rmtree(target, ignore_errors=True)
    if not target.is_dir():
        directory.mkdir(parents=True, exist_ok=True)
        # An incomplete installation must not be taken for a complete one the next time.
        with tempfile.TemporaryDirectory(dir=directory, prefix=".") as temporary:
            partial = Path(temporary) / "installed"
            _install([str(requirement) for requirement in wanted], partial)
            for _ in range(MAX_ROUNDS):
                more = sorted(set(unmet(partial)))
                if not more:
                    break
                _install(more, partial)
            else:
                raise UsageProblem(f"{release}: its requirements contradict one another: {', '.join(more)}")
            partial.rename(target)
    return target


def unmet(target: Path) -> Iterator[str]:
    """Yield what the distributions in the directory require and neither it nor the environment has."""
    path = [str(target), *sys.path]
    for distribution in importlib.metadata.distributions(path=[str(target)]):
        for text in distribution.requires or ():
            requirement = Requirement(text)
            applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            kept = canonicalize_name(requirement.name) in PACKAGES_KEPT
            if applies and not kept and not fits(requirement, version_of(requirement.name, path)):
                yield f"{requirement.name}{requirement.specifier}"


def environment(target: Path) -> dict[str, str]:
    """Return the environment in which Python imports from the directory first."""
    paths = [str(target), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def _install(wanted: Sequence[str], target: Path) -> None:
    options = ("--quiet", "--no-deps", "--upgrade", "--target", str(target))
    pip("install", *options, *wanted, problem=f"pip cannot install {', '.join(wanted)}")


def pip(*arguments: str, problem: str) -> str:
    """Run pip and return what it prints. Raises UsageProblem with that problem and the last two lines of pip's errors."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        errors = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        raise UsageProblem(f"{problem}: {' '.join(errors[-2:])}")
    return done.stdout
