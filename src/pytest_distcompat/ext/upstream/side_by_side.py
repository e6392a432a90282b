"""Installation of other releases, each in a directory that comes first on PYTHONPATH.

``distcompat releases`` (``releases.py``, ``changed.py``) runs the same tests with other releases of
a package, without changing the installed packages. ``install("accelerate==1.12.0", directory)`` has
pip install into ``directory/accelerate==1.12.0`` (``pip install --target``); Python started with
``environment(target)`` imports accelerate from there and all else from the environment.

Only the release itself is installed, and then, in rounds, those of its requirements that the
installed packages do not meet: pip's own resolver would install torch again, gigabytes.
"""

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

#: Packages that are never installed as a requirement of another: torch takes gigabytes, and
#: packages compiled against it would have to change too.
PACKAGES_KEPT = ("torch",)
#: How many times newly installed packages may require further ones.
MAX_ROUNDS = 5
#: The end of a URL that always names the same sources.
_COMMIT = re.compile(r"@[0-9a-f]{40}$")


def requirements(release: str) -> list[Requirement]:
    """Parse releases: ``transformers==4.57.6,accelerate==1.12.0``, or ``transformers @ git+...``.

    Raises:
        UsageProblem: If a part is no requirement, or names no release.
    """
    parsed = []
    for text in release.split(","):
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            raise UsageProblem(
                f"{text!r} is no release of a package; expected: transformers==4.57.6"
            ) from None
        pins = []
        for specifier in requirement.specifier:
            if specifier.operator == "==" and "*" not in specifier.version:
                pins.append(specifier)
        if len(pins) != 1 and not requirement.url:
            expected = f"{requirement.name}==1.2.3 or {requirement.name} @ git+https://..."
            raise UsageProblem(f"{text}: which release? Expected: {expected}")
        parsed.append(requirement)
    return parsed


def file_name(release: str) -> str:
    """Return the name of a release's directory and files.

    Letters that file systems or shells may not take become a hyphen: ``accelerate @ git+https://x``
    becomes ``accelerate-git+https-x``.
    """
    return re.sub(r"[^\w.=+,-]+", "-", release)


def install(release: str, directory: Path) -> Path:
    """Return the directory with these releases, and install them there if needed.

    It also has what they require beyond the installed packages. Two kinds are installed again: a
    release from a URL that names no commit, each time; and one whose requirements are no longer
    met, as the installed packages have changed.

    Args:
        release: The releases, as ``requirements`` reads them.
        directory: Where the directories of releases are.

    Raises:
        UsageProblem: If pip fails.
    """
    pinned = requirements(release)
    target = directory / file_name(release)
    is_outdated = any(_may_change(requirement) for requirement in pinned)
    if is_outdated or (target.is_dir() and any(unmet(target))):
        shutil.rmtree(target, ignore_errors=True)
    if target.is_dir():
        return target
    directory.mkdir(parents=True, exist_ok=True)
    # An incomplete installation must not be taken for a complete one the next time.
    with tempfile.TemporaryDirectory(dir=directory, prefix=".") as temporary:
        partial = Path(temporary) / "installed"
        _install([str(requirement) for requirement in pinned], partial)
        _install_unmet(partial, release)
        partial.rename(target)
    return target


def _may_change(requirement: Requirement) -> bool:
    """Tell whether the requirement may name other sources the next time, as a branch does."""
    return bool(requirement.url) and not _COMMIT.search(str(requirement.url))


def _install_unmet(target: Path, release: str) -> None:
    """Install what the distributions in the directory require, until nothing is missing.

    Raises:
        UsageProblem: If pip fails, or something is still missing after several rounds.
    """
    for _ in range(MAX_ROUNDS):
        missing = sorted(set(unmet(target)))
        if not missing:
            return
        _install(missing, target)
    listed = ", ".join(missing)
    raise UsageProblem(f"{release}: its requirements contradict one another: {listed}")


def unmet(target: Path) -> Iterator[str]:
    """Yield what the directory's distributions require and neither it nor the environment has.

    A yielded text is a requirement: ``tokenizers<=0.23.0,>=0.22.0``.
    """
    path = [str(target), *sys.path]
    for distribution in importlib.metadata.distributions(path=[str(target)]):
        for text in distribution.requires or ():
            requirement = Requirement(text)
            # Not one of an extra, or of another platform.
            applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            kept = canonicalize_name(requirement.name) in PACKAGES_KEPT
            if not applies or kept:
                continue
            version = version_of(requirement.name, path)
            if not fits(requirement, version):
                yield f"{requirement.name}{requirement.specifier}"


def environment(target: Path) -> dict[str, str]:
    """Return the environment in which Python imports from the directory first."""
    paths = [str(target)]
    inherited = os.environ.get("PYTHONPATH")
    if inherited:
        paths.append(inherited)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def _install(packages: Sequence[str], target: Path) -> None:
    """Install packages, without what they require, into a directory. Raises UsageProblem."""
    options = ("--quiet", "--no-deps", "--upgrade", "--target", str(target))
    names = ", ".join(packages)
    pip("install", *options, *packages, problem=f"pip cannot install {names}")


def pip(*arguments: str, problem: str) -> str:
    """Run pip and return what it prints.

    Args:
        arguments: The arguments of pip.
        problem: What is said if pip fails.

    Raises:
        UsageProblem: If pip fails, with that problem and the last two lines of pip's errors.
    """
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode:
        output = process.stderr or process.stdout
        errors = [line for line in output.splitlines() if line.strip()]
        last_errors = " ".join(errors[-2:])
        raise UsageProblem(f"{problem}: {last_errors}")
    return process.stdout
