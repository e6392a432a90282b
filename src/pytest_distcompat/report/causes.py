"""Failures grouped by what they say: of a run that broke off, every check of the cell tells the same."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from pytest_distcompat.report.result import Result

#: What differs from one rank, run or layer to the next where the cause is the same.
_CHANCE = re.compile(r"0x[0-9a-f]+|\branks? \d+(, \d+)*|\d+(\.\d+)?(e-?\d+)?", re.IGNORECASE)

#: The last line of a traceback that stands inside a message: an exception of several ranks is told as theirs.
_ROOT = re.compile(r"^[A-Za-z_][\w.]*(?:Error|Exception)\b.*", re.MULTILINE)
_RANK = re.compile(r"\brank (\d+)\b")
_SEVERAL = re.compile(r"\branks (\d+)")


@dataclass(frozen=True)
class Cause:
    """Verdicts that read alike."""

    results: tuple[Result, ...]

    @property
    def headline(self) -> str:
        """What they say, in the words of the first."""
        return _headline(self.results[0])

    @property
    def wording(self) -> str:
        """What they say, without what is chance: what makes them one cause."""
        return _same(self.results[0])

    @property
    def words(self) -> str:
        """The statuses: FAIL, CRASH."""
        return ", ".join(dict.fromkeys(result.word for result in self.results))

    @property
    def cells(self) -> dict[str, list[str]]:
        """Cell, with its driver, to its checks."""
        found: dict[str, list[str]] = {}
        for result in self.results:
            found.setdefault(f"{result.cell} ({result.driver})", []).append(result.check)
        return found

    @property
    def reproduce(self) -> str:
        """The command that shows one of them alone."""
        return next((result.reproduce for result in self.results if result.reproduce), "")


def causes(results: Iterable[Result]) -> list[Cause]:
    """What makes the run red, the most frequent cause first."""
    found: dict[str, list[Result]] = {}
    for result in results:
        if result.red:
            found.setdefault(_same(result), []).append(result)
    return [Cause(tuple(group)) for group in sorted(found.values(), key=len, reverse=True)]


def _same(result: Result) -> str:
    """What results of one cause have in common; one that says nothing is a cause of its own."""
    return wording(result) or result.nodeid


def wording(result: Result) -> str:
    """What it says, without what is chance: numbers, and which rank."""
    return _CHANCE.sub("#", _headline(result))


def unshown(count: int) -> str:
    """The line for causes that are left out."""
    return f"and {count} more cause{'s' if count > 1 else ''}"


def _headline(result: Result) -> str:
    """What went wrong, where the message begins with what was expected instead: ``judge`` has that after an empty line.

    A first line that says nothing by itself is followed by the one that does: ``Error(s) in loading state_dict for X:``, or an
    exception that is made of other ranks' tracebacks.
    """
    message = result.message.strip()
    if message.startswith(("fails otherwise than declared", "fails as declared, and otherwise too")):
        message = message.partition("\n\n")[2].strip() or message
    first, _, rest = message.partition("\n\n")[0].partition("\n")
    more = rest.strip()
    if first.endswith(":") and more:
        return f"{first} {more.splitlines()[0]}"
    root = _ROOT.search(more) if more.startswith("Traceback") else None
    return f"{first.partition(': ')[0]}: {root[0]}" if root else first


def rank_of_cause(message: str) -> int | None:
    """The rank that a finding names first, in its own words; None where it names none."""
    for line in message.splitlines():
        named = _RANK.search(line) or _SEVERAL.search(line)
        if named:
            return int(named[1])
    return None
