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
    r"(?P<package>[\w.-]+)\s*(?:==|@\s*git\+(?P<url>\S+)@)(?P<first>[^\s@]+?)\.\.(?P<last>[^\s@]+)", re.ASCII
)

Outcome = TypeVar("Outcome")


def releases_of(text: str, directory: Path) -> list[str]:
    """Return the releases of a range, the oldest first. Raises UsageProblem, also if pip or git fails.

    ``PACKAGE==FIRST..LAST``: releases of the package index, pre-releases left out. ``PACKAGE @ git+URL@FIRST..LAST``: commits of
    the first-parent history, from a clone that is kept in the directory.
    """
    found = _RANGE.fullmatch(text.strip())
    if found is None:
        expected = (
            "accelerate==1.12.0..1.13.0 or accelerate @ git+https://github.com/huggingface/accelerate@v1.12.0..main"
        )
        raise UsageProblem(f"{text!r} is no range of releases; expected: {expected}")
    package, url, first, last = found.group("package", "url", "first", "last")
    if url:
        return [
            f"{package} @ git+{url}@{commit}" for commit in _commits(url, first, last, directory / f"{package}.git")
        ]
    listed = pip("index", "versions", "--pre", "--json", package, problem=f"pip lists no releases of {package}")
    known = sorted(map(Version, json.loads(listed)["versions"]))
    ends = []
    for end in (first, last):
        try:
            ends.append(known.index(Version(end)))
        except (InvalidVersion, ValueError):
            releases = ", ".join(map(str, known[-20:]))
            raise UsageProblem(f"{package} has no release {end}; the newest: {releases}") from None
    if ends[0] >= ends[1]:
        raise UsageProblem(f"{text}: the first release is not older than the last")
    chosen = known[ends[0] : ends[1] + 1]
    return [f"{package}=={one}" for one in chosen if not one.is_prerelease or str(one) in {first, last}]


def bisect(
    releases: Sequence[str], run: Callable[[str], Outcome], red: Callable[[Outcome], bool | None]
) -> Iterator[Outcome]:
    """Run the first release, the last one, and those between that halve what is left; yield each outcome.

    A release that is neither red nor green is left out, and the one next to it is taken.
    """
    yield (first := run(releases[0]))
    yield (last := run(releases[-1]))
    if None in {red(first), red(last)} or red(first) == red(last):
        return
    below, above = 0, len(releases) - 1
    left = list(range(1, above))
    while left:
        middle = min(left, key=lambda number: abs(2 * number - below - above))
        yield (outcome := run(releases[middle]))
        if red(outcome) is None:
            left.remove(middle)
        elif red(outcome) == red(first):
            below, left = middle, [number for number in left if number > middle]
        else:
            above, left = middle, [number for number in left if number < middle]


def _commits(url: str, first: str, last: str, clone: Path) -> list[str]:
    """Return the commits of the first-parent history from the first revision to the last."""
    if clone.is_dir():
        _git("fetch", "--quiet", "--tags", "origin", clone=clone)
    else:
        clone.parent.mkdir(parents=True, exist_ok=True)
        _git("clone", "--quiet", "--no-checkout", "--filter=blob:none", url, str(clone))
    start, end = (
        _git(
            "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}", clone=clone, what=revision
        )
        for revision in (_revision(first, clone), _revision(last, clone))
    )
    commits = _git("rev-list", "--reverse", "--first-parent", f"{start}..{end}", clone=clone).split()
    if not commits or commits[-1] != end:
        raise UsageProblem(f"{url}: {first} is no ancestor of {last}")
    return [start, *commits]


def _revision(name: str, clone: Path) -> str:
    """Return a branch's name as that of the fetched branch: the clone's own is as old as the clone."""
    fetched = f"refs/remotes/origin/{name}"
    return fetched if _git("for-each-ref", fetched, clone=clone) else name


def _git(*arguments: str, clone: Path | None = None, what: str = "") -> str:
    command = ["git", *(("-C", str(clone)) if clone else ()), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UsageProblem(f"git knows no revision {what}" if what else f"git: {' '.join(done.stderr.split())}")
    return done.stdout.strip()
