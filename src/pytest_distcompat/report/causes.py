"""Causes: failures grouped by message, since every check of a cell reports the same failed run.

A report has a *verdict* (passed, failed, crashed, ...) for each *check* in each *cell* of a suite;
a cell is a configuration of the trainer, as ``fsdp2-fp32-w2``. *Red* are those that make a session
fail. If a training crashes, ten checks that read it are red with one message. If a trainer loses a
name, a check is red in ten cells, with messages such as ``'layer.0' is missing on rank 1``. Both
are one *cause*. All formats of a report call ``causes`` and list these instead of single verdicts.

A *run* is one process group from start to end. If it ends early, by a crash for example, its
message becomes that of each check that needs it, and ``Verdict.ended_run`` has its name. Otherwise
the message of a red verdict is a *finding* of the check itself. ``Verdict.place`` is the suite's
node id, as ``test_a.py::TestA``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pytest_distcompat.report.result import Change
from pytest_distcompat.status import Verdict

#: Numbers, ranks and addresses, which differ between failures of one cause.
_VARIABLE = re.compile(r"0x[0-9a-f]+|\branks? \d+(, \d+)*|\d+(\.\d+)?(e-?\d+)?", re.IGNORECASE)
#: Names in findings: of tensors and files in quotes, and of strategies, as in ``under ddp``.
_NAME = re.compile(r"'[^']*'|\bunder [\w#]+")

#: The last line of a traceback inside a message: an exception of several ranks contains theirs.
_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(?:Error|Exception)\b.*", re.MULTILINE)
#: The rank that a message names, and the first of several.
_RANK = re.compile(r"\brank (\d+)\b")
_RANKS = re.compile(r"\branks (\d+)")


@dataclass(frozen=True)
class Cause:
    """Failed verdicts with the same message, numbers aside.

    Attributes:
        results: The verdicts.
        follows: The number of the cause that may explain this one, counted from 1; None if there is
            none.
    """

    results: tuple[Verdict, ...]
    follows: int | None = None

    @property
    def headline(self) -> str:
        """Return the headline of the first verdict, with its own numbers and names."""
        return _headline(self.results[0])

    @property
    def key(self) -> tuple[str, str]:
        """Return what the verdicts share: the suite's node id, and the headline without numbers."""
        return _key(self.results[0])

    @property
    def words(self) -> str:
        """Return the statuses as the matrix shows them: ``FAIL, CRASH``."""
        words = dict.fromkeys(result.status.word for result in self.results)
        return ", ".join(words)

    @property
    def cells(self) -> dict[str, list[str]]:
        """Return the failed checks of each cell: ``{"ddp-fp32-w2 (torch)": ["names"]}``."""
        return cells_of(self.results)

    @property
    def reproduce(self) -> str:
        """Return the command that runs one of the verdicts alone; empty if there is none."""
        for result in self.results:
            if result.reproduce:
                return result.reproduce
        return ""


def causes(results: Iterable[Verdict]) -> list[Cause]:
    """Return the causes of the red verdicts.

    The causes of a suite are together, and a cause comes before what may follow from it.

    A run that ends early may follow from what a check has found in the same cell: the check read
    what the ranks recorded before. For example a check finds an optimizer with stale parameters,
    and later torch fails to save that optimizer.
    """
    causes_in_order: list[Cause] = []
    # Suite and cell to the number of the first cause that a check found in that cell.
    first_cause_of_cell: dict[tuple[str, str], int] = {}
    for number, group in enumerate(_ordered_groups(results), 1):
        follows = None
        if _ended_early(group):
            follows = _only_earlier_cause(group, first_cause_of_cell)
        else:
            for result in group:
                first_cause_of_cell.setdefault((result.place, result.cell), number)
        causes_in_order.append(Cause(tuple(group), follows))
    return causes_in_order


def _ordered_groups(results: Iterable[Verdict]) -> list[list[Verdict]]:
    """Return the red verdicts in groups, one for each cause, suite by suite.

    In a suite the causes by which a run ended early come last.
    """
    groups: dict[tuple[str, str], list[Verdict]] = {}
    suite_positions: dict[str, int] = {}
    for result in results:
        if not result.red:
            continue
        suite_positions.setdefault(result.place, len(suite_positions))
        # The key has the suite: two trainers may fail with the same words for different reasons.
        groups.setdefault(_key(result), []).append(result)

    def position(group: list[Verdict]) -> tuple[int, bool]:
        return suite_positions[group[0].place], _ended_early(group)

    return sorted(groups.values(), key=position)


def _only_earlier_cause(
    group: Iterable[Verdict], first_cause_of_cell: Mapping[tuple[str, str], int]
) -> int | None:
    """Return the number of the only cause that a check found before in these cells.

    The result is None if there is no such cause, or if there are several: which of them explains
    the failed run is not known then.

    Args:
        group: The verdicts of a cause by which a run ended early.
        first_cause_of_cell: Suite and cell to the number of the first cause found in that cell.
    """
    numbers = set()
    for result in group:
        number = first_cause_of_cell.get((result.place, result.cell))
        if number is not None:
            numbers.add(number)
    if len(numbers) != 1:
        return None
    return numbers.pop()


def _ended_early(group: Iterable[Verdict]) -> bool:
    """Tell whether a cause is a run that ended early, and not a finding of a check."""
    return all(result.ended_run for result in group)


def cells_of(verdicts: Iterable[Verdict | Change]) -> dict[str, list[str]]:
    """Return the checks of the verdicts by cell: ``{"ddp-fp32-w2 (torch)": ["names"]}``.

    A ``Change`` is a verdict that differs between two reports.
    """
    checks: dict[str, list[str]] = {}
    for verdict in verdicts:
        cell = f"{verdict.cell} ({verdict.driver})"
        checks.setdefault(cell, []).append(verdict.check)
    return checks


def _key(result: Verdict) -> tuple[str, str]:
    """Return the key of a result's cause: results with equal keys have one cause.

    A result without a message is a cause of its own.
    """
    cause = wording(result)
    if not result.ended_run:
        # Findings of one kind name one tensor or another; exceptions that name another key have
        # another cause.
        cause = _NAME.sub("#", cause)
    return result.place, cause or result.nodeid


def wording(result: Verdict) -> str:
    """Return the headline of a result with ``#`` for each number and rank."""
    return constant_part(_headline(result))


def constant_part(text: str) -> str:
    """Return a text with ``#`` for each number, rank and address: ``3 differ`` is ``# differ``."""
    return _VARIABLE.sub("#", text)


def unshown(count: int) -> str:
    """Return the line about the causes that a list leaves out: ``and 3 more causes``."""
    plural = "s" if count > 1 else ""
    return f"and {count} more cause{plural}"


def _headline(result: Verdict) -> str:
    """Return the line of the message that names the failure.

    Some first lines need the next one: ``Error(s) in loading state_dict for X:``, or an exception
    that contains the tracebacks of other ranks.
    """
    paragraph, _, _ = result.message.strip().partition("\n\n")
    first_line, _, rest = paragraph.partition("\n")
    rest = rest.strip()
    if first_line.endswith(":") and rest:
        second_line, *_ = rest.splitlines()
        return f"{first_line} {second_line}"
    if rest.startswith("Traceback"):
        # What the first line says up to its colon, and the exception at the end of the traceback.
        exception = _EXCEPTION.search(rest)
        if exception:
            context, _, _ = first_line.partition(": ")
            return f"{context}: {exception[0]}"
    return first_line


def rank_of_cause(message: str) -> int | None:
    """Return the first rank that a message names; None if it names none.

    It is 1 for ``rank 1 has ...``. Of several, as in ``ranks 0 and 2 have ...``, it is the first
    number.
    """
    for line in message.splitlines():
        rank = _RANK.search(line) or _RANKS.search(line)
        if rank:
            return int(rank[1])
    return None
