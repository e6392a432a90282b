"""Causes: failures grouped by message, since every check of a cell reports the same failed run."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from pytest_distcompat.report.result import Result

#: Numbers, ranks and addresses, which differ between failures of one cause.
_VARIABLE = re.compile(r"0x[0-9a-f]+|\branks? \d+(, \d+)*|\d+(\.\d+)?(e-?\d+)?", re.IGNORECASE)

#: The last line of a traceback inside a message: an exception of several ranks contains theirs.
_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(?:Error|Exception)\b.*", re.MULTILINE)
_RANK = re.compile(r"\brank (\d+)\b")
_RANKS = re.compile(r"\branks (\d+)")


@dataclass(frozen=True)
class Cause:
    """Failed verdicts with the same message, numbers aside."""

    results: tuple[Result, ...]

    @property
    def headline(self) -> str:
        """Return the headline of the first verdict."""
        return _headline(self.results[0])

    @property
    def wording(self) -> str:
        """Return the text that the verdicts share: the headline without its numbers."""
        return _key(self.results[0])

    @property
    def words(self) -> str:
        """Return the statuses as the matrix shows them: ``FAIL, CRASH``."""
        return ", ".join(dict.fromkeys(result.word for result in self.results))

    @property
    def cells(self) -> dict[str, list[str]]:
        """Return the failed checks by cell and driver."""
        found: dict[str, list[str]] = {}
        for result in self.results:
            found.setdefault(f"{result.cell} ({result.driver})", []).append(result.check)
        return found

    @property
    def reproduce(self) -> str:
        """Return the command that runs one of the verdicts alone; empty if there is none."""
        return next((result.reproduce for result in self.results if result.reproduce), "")


def causes(results: Iterable[Result]) -> list[Cause]:
    """Return the causes of the red verdicts, the most frequent first."""
    found: dict[str, list[Result]] = {}
    for result in results:
        if result.red:
            found.setdefault(_key(result), []).append(result)
    return [Cause(tuple(group)) for group in sorted(found.values(), key=len, reverse=True)]


def _key(result: Result) -> str:
    """Return the key of a result's cause; a result without a message is a cause of its own."""
    return wording(result) or result.nodeid


def wording(result: Result) -> str:
    """Return the headline of a result without numbers and ranks."""
    return _VARIABLE.sub("#", _headline(result))


def unshown(count: int) -> str:
    """Return the line that counts the causes that are left out."""
    return f"and {count} more cause{'s' if count > 1 else ''}"


def _headline(result: Result) -> str:
    """Return the line of the message that names the failure.

    Where the message begins with a declaration, ``judge`` has the failure after an empty line. Some first lines need the next
    one: ``Error(s) in loading state_dict for X:``, or an exception that contains the tracebacks of other ranks.
    """
    message = result.message.strip()
    if message.startswith(("fails otherwise than declared", "fails as declared, and otherwise too")):
        message = message.partition("\n\n")[2].strip() or message
    first, _, rest = message.partition("\n\n")[0].partition("\n")
    more = rest.strip()
    if first.endswith(":") and more:
        return f"{first} {more.splitlines()[0]}"
    root = _EXCEPTION.search(more) if more.startswith("Traceback") else None
    return f"{first.partition(': ')[0]}: {root[0]}" if root else first


def rank_of_cause(message: str) -> int | None:
    """Return the rank that a finding names first, None where it names none."""
    for line in message.splitlines():
        named = _RANK.search(line) or _RANKS.search(line)
        if named:
            return int(named[1])
    return None
