"""Bisection of releases, or of commits, of a package: which one turned a session red, or green.

``distcompat releases --bisect accelerate==1.8.0..1.13.0 -- tests`` (``releases.py``) calls this
module twice: ``releases_of`` lists the releases of the range, from pip's index or from a git
repository; ``bisect`` runs the tests with some of them. *Red* is a session whose tests fail,
*green* one whose tests pass; with a release that cannot be installed it is neither.
"""

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

#: ``accelerate==1.8.0..1.13.0``, or ``accelerate @ git+https://...@v1.8.0..main``.
_RANGE = re.compile(
    r"(?P<package>[\w.-]+)\s*(?:==|@\s*git\+(?P<url>\S+)@)(?P<first>[^\s@]+?)\.\.(?P<last>[^\s@]+)",
    re.ASCII,
)

#: What a run with one release came to; ``_release_runs.Run``.
Outcome = TypeVar("Outcome")


def releases_of(text: str, directory: Path) -> list[str]:
    """Return the releases of a range, the oldest first: ``["accelerate==1.8.0", ...]``.

    ``PACKAGE==FIRST..LAST``: releases of the package index, pre-releases left out. ``PACKAGE @
    git+URL@FIRST..LAST``: commits of the first-parent history.

    Args:
        text: The range.
        directory: A clone for the commits is kept there.

    Raises:
        UsageProblem: If the text is no range, or pip or git fails.
    """
    match = _RANGE.fullmatch(text.strip())
    if match is None:
        expected = (
            "accelerate==1.12.0..1.13.0 or "
            "accelerate @ git+https://github.com/huggingface/accelerate@v1.12.0..main"
        )
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

    releases = []
    for version in versions[start : end + 1]:
        # A pre-release counts where the user names it.
        if not version.is_prerelease or str(version) in {first, last}:
            releases.append(f"{package}=={version}")
    return releases


def _position(name: str, versions: Sequence[Version], package: str) -> int:
    """Return the index of the version of that name.

    Raises:
        UsageProblem: If the package has no such release.
    """
    try:
        return versions.index(Version(name))
    except (InvalidVersion, ValueError):
        newest = ", ".join(map(str, versions[-20:]))
        raise UsageProblem(f"{package} has no release {name}; the newest: {newest}") from None


def bisect(
    releases: Sequence[str],
    run: Callable[[str], Outcome],
    red: Callable[[Outcome], bool | None],
) -> Iterator[Outcome]:
    """Run the first release and the last, and between them locate the change of colour.

    If only one of them is red, the releases between are halved until it is located.

    Args:
        releases: The releases, the oldest first.
        run: Runs the tests with a release.
        red: Tells whether an outcome is red; None if it is neither red nor green. Then a release
            beside it is run instead.

    Yields:
        The outcome of each run.
    """
    first = run(releases[0])
    yield first
    last = run(releases[-1])
    yield last
    first_is_red = red(first)
    last_is_red = red(last)
    if first_is_red is None or last_is_red is None or first_is_red == last_is_red:
        return
    # The newest release known to be as the first, and the oldest known to be as the last.
    like_first, like_last = 0, len(releases) - 1
    # The releases between these two that may still be run. One that is neither red nor green leaves
    # the list and moves no limit.
    candidates = list(range(1, like_last))
    while candidates:
        middle = _nearest_to_middle(candidates, like_first, like_last)
        outcome = run(releases[middle])
        yield outcome
        is_red = red(outcome)
        if is_red is None:
            candidates.remove(middle)
        elif is_red == first_is_red:
            like_first = middle
            candidates = candidates[candidates.index(middle) + 1 :]
        else:
            like_last = middle
            candidates = candidates[: candidates.index(middle)]


def _nearest_to_middle(candidates: Sequence[int], low: int, high: int) -> int:
    """Return the candidate that halves the range between two numbers best, or the lower of two."""

    def distance(number: int) -> int:
        return abs(2 * number - low - high)

    return min(candidates, key=distance)


def _commits(url: str, first: str, last: str, clone: Path) -> list[str]:
    """Return the commits of the first-parent history from the first revision to the last.

    Args:
        url: The repository.
        first: A tag, branch or commit.
        last: Another one.
        clone: The directory of the clone; it is made if it does not exist, else fetched.
    """
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
    listing = _git("rev-list", "--reverse", "--first-parent", f"{start}..{end}", clone=clone)
    commits = listing.split()
    # A commit of the first revision's history that the last one's lacks, if there is any.
    only_of_first = _git("rev-list", "--max-count=1", f"{end}..{start}", clone=clone)
    if not commits or only_of_first:
        raise UsageProblem(f"{url}: {first} is no ancestor of {last}")
    return [start, *commits]


def _commit(revision: str, clone: Path) -> str:
    """Return the hash of a revision's commit.

    Raises:
        UsageProblem: If git does not know the revision.
    """
    options = ("--verify", "--quiet", "--end-of-options")
    return _git("rev-parse", *options, f"{revision}^{{commit}}", clone=clone, revision=revision)


def _revision(name: str, clone: Path) -> str:
    """Return the name of the fetched branch for that of a branch, and other names as they are.

    ``main`` becomes ``refs/remotes/origin/main``: the clone's own branch is as old as the clone.
    """
    fetched = f"refs/remotes/origin/{name}"
    if _git("for-each-ref", fetched, clone=clone):
        return fetched
    return name


def _git(*arguments: str, clone: Path | None = None, revision: str = "") -> str:
    """Run git and return what it prints.

    Args:
        arguments: The arguments of git.
        clone: The repository; None for a command without one.
        revision: The revision that is looked up, if one is.

    Raises:
        UsageProblem: If git fails. It names the revision if one is looked up.
    """
    command = ["git"]
    if clone:
        command += ["-C", str(clone)]
    command += arguments
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode == 0:
        return process.stdout.strip()
    if revision:
        raise UsageProblem(f"git knows no revision {revision}")
    errors = " ".join(process.stderr.split())
    raise UsageProblem(f"git: {errors}")
