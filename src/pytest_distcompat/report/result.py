"""One item's result, as the reports know it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

#: How each status reads in the matrix. Capitals are for what makes the run red, so that no colour is needed to see it.
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
    "leaked": "LEAK",
    "error": "ERROR",
}
#: The statuses that make a run red. ``error``: the item came to no verdict at all.
RED = frozenset({"failed", "fixed?", "late", "crashed", "hung", "leaked", "error"})
#: Which of two verdicts on the same thing counts: what is red, then what is not as it should be, then what ran at all.
_WEIGHT = {**dict.fromkeys(RED, 4), "known": 3, "refused": 2, "passed": 2, "skipped": 1}


@dataclass(frozen=True)
class Result:
    """One check in one cell of one suite.

    ``rank`` is the rank that failed first, or that the finding names; ``seconds`` what the item took, with the runs that it
    was the first to need; ``reproduce`` the command that runs it alone, empty for an item that came to no verdict. ``teardown``
    is what its teardown failed with, besides.
    """

    suite: str
    driver: str
    cell: str
    check: str
    status: str
    message: str = ""
    reason: str = ""
    nodeid: str = ""
    seconds: float = 0.0
    rank: int | None = None
    reproduce: str = ""
    teardown: str = ""

    @property
    def word(self) -> str:
        """As it reads in the matrix."""
        return WORDS.get(self.status, self.status)

    @property
    def red(self) -> bool:
        """Whether it makes the run red."""
        return self.status in RED

    @property
    def weight(self) -> int:
        """Of two on the same check in the same cell the heavier one counts."""
        return _WEIGHT.get(self.status, 0)

    @property
    def place(self) -> str:
        """The suite's own place: classes of one name in two modules are two suites."""
        return self.nodeid.rpartition("::test")[0]

    @property
    def headline(self) -> str:
        """The first line of the message that says anything."""
        return next((line.strip() for line in self.message.splitlines() if line.strip()), "")

    @property
    def why(self) -> str:
        """The reason in one line, where nobody gave one the first line of the message."""
        return self.reason or self.headline


@dataclass
class Row:
    """What a cell has beside its verdicts.

    ``not_applicable``: the checks without a verdict, each with the reason. ``cost``: the fields of ``cost.Cost``. ``runs``: the
    ids of the runs that its checks read. ``names``, ``dtypes``, ``steps`` and ``memory``: what its training showed
    (``evidence.cells``).
    """

    suite: str
    driver: str
    cell: str
    place: str = ""
    not_applicable: dict[str, str] = field(default_factory=dict)
    #: None stands for a number that JSON does not have.
    cost: dict[str, float | None] = field(default_factory=dict)
    runs: list[str] = field(default_factory=list)
    names: list[dict[str, Any]] = field(default_factory=list)
    dtypes: list[dict[str, Any]] = field(default_factory=list)
    steps: dict[str, list[float | None]] = field(default_factory=dict)
    memory: list[int] = field(default_factory=list)


def not_applicable_reasons(rows: Iterable[Row]) -> dict[tuple[str, str], list[str]]:
    """(check, why it has nothing to say) to the cells."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for check, reason in row.not_applicable.items():
            reasons.setdefault((check, reason), []).append(row.cell)
    return reasons


def by_suite(results: Iterable[Result]) -> list[list[Result]]:
    """Grouped, in the order of first appearance."""
    suites: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        suites.setdefault((result.suite, result.place), []).append(result)
    return list(suites.values())


@dataclass(frozen=True)
class Table:
    """One suite's matrix: a row a cell, a column a check; None where a cell has no such verdict."""

    checks: tuple[str, ...]
    cells: tuple[str, ...]
    found: dict[tuple[str, str], Result]

    @classmethod
    def of(cls, results: Iterable[Result]) -> Table:
        """The matrix of one suite's results, in their order: of items that a fixture made several of, the worst."""
        found: dict[tuple[str, str], Result] = {}
        for result in results:
            known = found.setdefault((result.cell, result.check), result)
            if result.weight > known.weight:
                found[result.cell, result.check] = result
        return cls(
            tuple(dict.fromkeys(check for _, check in found)), tuple(dict.fromkeys(cell for cell, _ in found)), found
        )

    def word(self, cell: str, check: str) -> str:
        """Return the word of the verdict, empty where there is none."""
        result = self.found.get((cell, check))
        return result.word if result else ""
