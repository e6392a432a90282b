"""Tables of verdicts, rows of cells and changes of verdicts, as reports have them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from pytest_distcompat.grouping import grouped
from pytest_distcompat.status import Status, Verdict


@dataclass
class Row:
    """Data of a cell besides its verdicts.

    ``not_applicable``: the checks without a verdict, each with the reason. ``cost``: the fields of ``cost.Cost``. ``runs``: the
    ids of the runs that its checks read. ``names``, ``dtypes``, ``mesh``, ``steps``, ``memory``, ``tensor_bytes`` and ``sent``:
    the evidence of its training (``evidence.cells``).
    """

    suite: str
    driver: str
    cell: str
    place: str = ""
    not_applicable: dict[str, str] = field(default_factory=dict)
    #: A value is None for a number that JSON does not have.
    cost: dict[str, float | None] = field(default_factory=dict)
    runs: list[str] = field(default_factory=list)
    names: list[dict[str, Any]] = field(default_factory=list)
    dtypes: list[dict[str, Any]] = field(default_factory=list)
    mesh: dict[str, Any] | None = None
    steps: dict[str, list[float | None]] = field(default_factory=dict)
    memory: list[int] = field(default_factory=list)
    tensor_bytes: dict[str, list[int]] = field(default_factory=dict)
    sent: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def of(cls, verdict: Verdict, **more: Any) -> Row:
        """Return the row of the verdict's cell."""
        return cls(verdict.suite, verdict.driver, verdict.cell, verdict.place, **more)


def not_applicable_reasons(rows: Iterable[Row]) -> dict[tuple[str, str], list[str]]:
    """Return the cells by (check, reason for which it is not applicable)."""
    return grouped((pair, row.cell) for row in rows for pair in row.not_applicable.items())


@dataclass(frozen=True)
class Table:
    """Matrix of one suite: a row for each cell, a column for each check."""

    results: tuple[Verdict, ...]
    checks: tuple[str, ...]
    cells: tuple[str, ...]
    found: dict[tuple[str, str], Verdict]

    @classmethod
    def of(cls, results: Iterable[Verdict], order: Iterable[str] = ()) -> Table:
        """Return the matrix of a suite's results: of several for a check in a cell, the worst. ``order``: of the checks."""
        all_results = tuple(results)
        found: dict[tuple[str, str], Verdict] = {}
        for result in all_results:
            worst = found.setdefault((result.cell, result.check), result)
            if result.status.weight > worst.status.weight:
                found[result.cell, result.check] = result
        present = {check for _, check in found}
        checks = tuple(check for check in order or check_order(all_results) if check in present)
        return cls(all_results, checks, tuple(dict.fromkeys(cell for cell, _ in found)), found)

    @property
    def title(self) -> str:
        """Return the name of the suite, and its driver."""
        return f"{self.results[0].suite} (driver {self.results[0].driver})"

    def word(self, cell: str, check: str) -> str:
        """Return the word of the verdict, empty where there is none."""
        verdict = self.found.get((cell, check))
        return verdict.status.word if verdict else ""


def tables(results: Iterable[Verdict]) -> list[Table]:
    """Return the matrix of each suite, in the order of first appearance; all have their checks in the same order."""
    suites = grouped(((result.suite, result.place), result) for result in results)
    order = check_order(result for found in suites.values() for result in found)
    return [Table.of(found, order) for found in suites.values()]


def check_order(results: Iterable[Verdict]) -> list[str]:
    """Return all checks in the order that they have in their cells; where cells differ, the first to appear is first."""
    before: dict[str, set[str]] = {}
    for _, found in groupby(results, key=lambda result: (result.place, result.cell)):
        earlier: list[str] = []
        for result in found:
            before.setdefault(result.check, set()).update(earlier)
            earlier.append(result.check)
    order: list[str] = []
    while before:
        ready = (check for check, earlier in before.items() if earlier <= {*order, check})
        order.append(next(ready, next(iter(before))))
        del before[order[-1]]
    return order


def by_reason(results: Iterable[Verdict], status: str) -> dict[str, list[str]]:
    """Return the cells, with the check if it ran, of each reason for a status."""
    found: dict[str, list[str]] = {}
    for result in results:
        if result.status == status:
            name = result.cell if status == "skipped" else f"{result.cell}:{result.check}"
            names = found.setdefault(result.why, [])
            if name not in names:
                names.append(name)
    return found


@dataclass(frozen=True)
class Change:
    """Verdict that changed; ``before`` or ``after`` is empty where there was none."""

    suite: str
    driver: str
    cell: str
    check: str
    before: str
    after: str
    why: str = ""

    def __str__(self) -> str:
        """Return the change as one line."""
        return f"{self.cell}:{self.check} ({self.driver}): {self.what}"

    @property
    def what(self) -> str:
        """Return the words of the two statuses, and why."""
        words = " -> ".join(Status(status).word if status else "none" for status in (self.before, self.after))
        return f"{words}{f': {self.why}' if self.why else ''}"
