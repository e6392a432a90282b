"""Causes: failures grouped by message, since every check of a cell reports the same failed run."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from pytest_distcompat.grouping import grouped
from pytest_distcompat.report.result import Change
from pytest_distcompat.status import Verdict

#: Numbers, ranks and addresses, which differ between failures of one cause.
_VARIABLE = re.compile(r"0x[0-9a-f]+|\branks? \d+(, \d+)*|\d+(\.\d+)?(e-?\d+)?", re.IGNORECASE)
#: Names in findings: of tensors, files and strategies.
_NAME = re.compile(r"'[^']*'|\bunder [\w#]+")

#: The last line of a traceback inside a message: an exception of several ranks contains theirs.
_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(?:Error|Exception)\b.*", re.MULTILINE)
_RANK = re.compile(r"\brank (\d+)\b")
_RANKS = re.compile(r"\branks (\d+)")


@dataclass(frozen=True)
class Cause:
    """Failed verdicts with the same message, numbers aside; ``follows`` is the number of the cause that may explain it."""

    results: tuple[Verdict, ...]
    follows: int | None = None

    @property
    def headline(self) -> str:
        """Return the headline of the first verdict."""
        return _headline(self.results[0])

    @property
    def key(self) -> tuple[str, str]:
        """Return what the verdicts share: the suite, and the headline without its numbers."""
        return _key(self.results[0])

    @property
    def words(self) -> str:
        """Return the statuses as the matrix shows them: ``FAIL, CRASH``."""
        return ", ".join(dict.fromkeys(result.status.word for result in self.results))

    @property
    def cells(self) -> dict[str, list[str]]:
        """Return the failed checks by cell and driver."""
        return cells_of(self.results)

    @property
    def reproduce(self) -> str:
        """Return the command that runs one of the verdicts alone; empty if there is none."""
        return next((result.reproduce for result in self.results if result.reproduce), "")


def causes(results: Iterable[Verdict]) -> list[Cause]:
    """Return the causes of the red verdicts, those of a suite together, a cause before what may follow from it.

    A run that ends early may follow from what a check has found in the same cell: the check read what the ranks recorded
    before. An optimizer with stale parameters is found before torch fails to save it.
    """
    found: dict[tuple[str, str], list[Verdict]] = {}
    suites: dict[str, int] = {}
    for result in results:
        if result.red:
            suites.setdefault(result.place, len(suites))
            # Two trainers may fail with the same words for different reasons.
            found.setdefault(_key(result), []).append(result)
    groups = sorted(found.values(), key=lambda group: (suites[group[0].place], _ended_early(group)))
    ordered: list[Cause] = []
    first: dict[tuple[str, str], int] = {}
    for number, group in enumerate(groups, 1):
        earlier = {first.get((result.place, result.cell)) for result in group} - {None}
        follows = earlier.pop() if len(earlier) == 1 and _ended_early(group) else None
        ordered.append(Cause(tuple(group), follows))
        if not _ended_early(group):
            first = {(result.place, result.cell): number for result in group} | first
    return ordered


def _ended_early(group: Iterable[Verdict]) -> bool:
    return all(result.ended_run for result in group)


def cells_of(verdicts: Iterable[Verdict | Change]) -> dict[str, list[str]]:
    """Return the checks of the verdicts by cell and driver."""
    return grouped((f"{verdict.cell} ({verdict.driver})", verdict.check) for verdict in verdicts)


def _key(result: Verdict) -> tuple[str, str]:
    """Return the key of a result's cause; a result without a message is a cause of its own."""
    found = wording(result)
    # Findings of one kind name one tensor or another; exceptions that name another key have another cause.
    return result.place, (found if result.ended_run else _NAME.sub("#", found)) or result.nodeid


def wording(result: Verdict) -> str:
    """Return the headline of a result without numbers and ranks."""
    return constant_part(_headline(result))


def constant_part(text: str) -> str:
    """Return a text without numbers and ranks."""
    return _VARIABLE.sub("#", text)


def unshown(count: int) -> str:
    """Return the line that counts the causes that are left out."""
    return f"and {count} more cause{'s' if count > 1 else ''}"


def _headline(result: Verdict) -> str:
    """Return the line of the message that names the failure.

    Some first lines need the next one: ``Error(s) in loading state_dict for X:``, or an exception that contains the tracebacks
    of other ranks.
    """
    first, _, rest = result.message.strip().partition("\n\n")[0].partition("\n")
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
