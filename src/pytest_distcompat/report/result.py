"""One item's result, as the reports know it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

#: How each status reads in the matrix. Capitals are for what makes the run red.
WORDS = {
    "passed": "ok",
    "refused": "refused",
    "known": "known",
    "skipped": "-",
    "failed": "FAIL",
    "fixed?": "FIXED?",
    "late": "LATE",
    "crashed": "CRASH",
    "hung": "HUNG",
}


@dataclass(frozen=True)
class Result:
    """One check in one cell of one suite."""

    suite: str
    driver: str
    cell: str
    check: str
    status: str
    message: str = ""
    reason: str = ""
    nodeid: str = ""
    seconds: float = 0.0

    @property
    def word(self) -> str:
        """As it reads in the matrix."""
        return WORDS.get(self.status, self.status)

    @property
    def place(self) -> str:
        """The suite's own place: classes of one name in two modules are two suites."""
        return self.nodeid.rpartition("::test")[0]

    @property
    def why(self) -> str:
        """The reason in one line, where nobody gave one the first line of the message."""
        return self.reason or (self.message.splitlines() or [""])[0]


@dataclass
class Row:
    """What a cell has beside its verdicts: why it has no more of them, and what it cost (the fields of ``cost.Cost``)."""

    suite: str
    driver: str
    cell: str
    blanks: dict[str, str] = field(default_factory=dict)
    cost: dict[str, float] = field(default_factory=dict)


def blank_reasons(rows: Iterable[Row]) -> dict[tuple[str, str], list[str]]:
    """(check, why it has nothing to say) to the cells."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for check, reason in row.blanks.items():
            reasons.setdefault((check, reason), []).append(row.cell)
    return reasons


def by_suite(results: Iterable[Result]) -> list[list[Result]]:
    """Grouped, in the order of first appearance."""
    suites: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        suites.setdefault((result.suite, result.place), []).append(result)
    return list(suites.values())


def table(results: Iterable[Result]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of one suite's matrix: a row a cell, a column a check."""
    found = list(results)
    checks = list(dict.fromkeys(result.check for result in found))
    cells = list(dict.fromkeys(result.cell for result in found))
    word = {(result.cell, result.check): result.word for result in found}
    return ["", *checks], [[cell, *(word.get((cell, check), "") for check in checks)] for cell in cells]
