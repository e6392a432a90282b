"""Bisection of releases, or of commits, of a package: which one turned a session red, or green."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from packaging.version import InvalidVersion, Version

from pytest_distcompat.ext.upstream.side_by_side import pip
from pytest_distcompat.failures import UsageProblem

_RANGE = re.compile(
    r"(?P<package>[\w.-]+)\s*(?:==|@\s*git\+(?P<url>\S+)@)(?P<first>[^\s@]+?)\.\.(?P<last>[^\s@]+)",
    re.ASCII,
)

Outcome = TypeVar("Outcome")


def releases_of(text: str, directory: Path) -> list[str]:
    """Return the releases of a range, the oldest first. Raises UsageProblem, also if pip or git fails.

    ``PACKAGE==FIRST..LAST``: releases of the package index, pre-releases left out. ``PACKAGE @
    git+URL@FIRST..LAST``: commits of the first-parent history, from a clone that is kept in the
    directory.
    """
    match = _RANGE.fullmatch(text.strip())
    if match is None:
        expected = "accelerate==1.12.0..1.13.0 or accelerate @ git+https://github.com/huggingface/accelerate@v1.12.0..main"
        raise UsageProblem(f"{text!r} is no range of releases; expected: {expected}")
    package, url = match["package"], match["url"]
    first, last = match["first"], match["last"]
    if url:
        commits = _commits(url, first, last, directory / f"{package}.git")
        return [f"{package} @ git+{url}@{commit}" for commit in commits]
    listing = pip(
        "index",
        "versions",
        "--pre",
        "--json",
        package,
        problem=f"pip lists no releases of {package}",
    )
    versions = sorted(map(Version, json.loads(listing)["versions"]))
    start = _position(first, versions, package)
    end = _position(last, versions, package)
    if start >= end:
        raise UsageProblem(f"{text}: the first release is not older than the last")

    def is_offered(version: Version) -> bool:
        # A pre-release counts where the user names it.
        return not version.is_prerelease or str(version) in {first, last}

    return [f"{package}=={version}" for version in filter(is_offered, versions[start : end + 1])]


def _position(name: str, versions: Sequence[Version], package: str) -> int:
    """Return the index of the version of that name. Raises UsageProblem if the package has no such release."""
    try:
        return versions.index(Version(name))
    except (InvalidVersion, ValueError):
        newest = ", ".join(map(str, versions[-20:]))
        raise UsageProblem(f"{package} has no release {name}; the newest: {newest}") from None


def bisect(
    releases: Sequence[str], run: Callable[[str], Outcome], red: Callable[[Outcome], bool | None]
) -> Iterator[Outcome]:
    """Run the first release and the last; if only one of them is red, halve those between until the change is located.

    Args:
        releases: the oldest first.
        run: runs the tests with a release.
        red: tells whether an outcome is red; None if it is neither red nor green. The release next
            to such a one is taken.

    Yields:
        The outcome of each run.
    """
    first = run(releases[0])
    yield first
    last = run(releases[-1])
    yield last
    if None in {red(first), red(last)} or red(first) == red(last):
        return
    # The newest release known to be as the first, and the oldest known to be as the last.
    like_first, like_last = 0, len(releases) - 1
    candidates = list(range(1, like_last))
    while candidates:
        middle = _nearest_to_middle(candidates, like_first, like_last)
        outcome = run(releases[middle])
        yield outcome
        if red(outcome) is None:
            candidates.remove(middle)
        elif red(outcome) == red(first):
            like_first = middle
            candidates = candidates[candidates.index(middle) + 1 :]
        else:
            like_last = middle
            candidates = candidates[: candidates.index(middle)]


def _nearest_to_middle(candidates: Sequence[int], low: int, high: int) -> int:
    """Return the candidate that halves the range between two numbers best, the lower of two as good."""

    def distance(number: int) -> int:
        return abs(2 * number - low - high)

    return min(candidates, key=distance)


def _commits(url: str, first: str, last: str, clone: Path) -> list[str]:
    """Return the commits of the first-parent history from the first revision to the last."""
    if clone.is_dir():
        _git("fetch", "--quiet", "--tags", "origin", clone=clone)
    else:
        clone.parent.mkdir(parents=True, exist_ok=True)
        _git("clone", "--quiet", "--no-checkout", "--filter=blob:none", url, str(clone))
    # Both names come first: a failure of git itself is reported before an unknown revision.
    first_revision = _revision(first, clone)
    last_revision = _revision(last, clone)
    start = _commit(first_revision, clone)
    end = _commit(last_revision, clone)
    commits = _git(
        "rev-list", "--reverse", "--first-parent", f"{start}..{end}", clone=clone
    ).split()
    if not commits or commits[-1] != end:
        raise UsageProblem(f"{url}: {first} is no ancestor of {last}")
    return [start, *commits]


def _commit(revision: str, clone: Path) -> str:
    """Return the hash of a revision's commit. Raises UsageProblem if git does not know the revision."""
    options = ("--verify", "--quiet", "--end-of-options")
    return _git("rev-parse", *options, f"{revision}^{{commit}}", clone=clone, revision=revision)


def _revision(name: str, clone: Path) -> str:
    """Return a branch's name as that of the fetched branch: the clone's own is as old as the clone."""
    fetched = f"refs/remotes/origin/{name}"
    if _git("for-each-ref", fetched, clone=clone):
        return fetched
    return name


def _git(*arguments: str, clone: Path | None = None, revision: str = "") -> str:
    """Run git and return what it prints. Raises UsageProblem, which names the revision if one is looked up."""
    command = ["git"]
    if clone:
        command += ["-C", str(clone)]
    command += arguments
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode == 0:
        return process.stdout.strip()
    if revision:
        raise UsageProblem(f"git knows no revision {revision}")
    raise UsageProblem(f"git: {' '.join(process.stderr.split())}")
