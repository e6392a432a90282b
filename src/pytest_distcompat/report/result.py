"""Tables of verdicts, rows of cells and changes of verdicts, as reports have them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pytest_distcompat.registry import Registry
from pytest_distcompat.status import Status, Verdict
from pytest_distcompat.trace import RunTrace


@dataclass
class Row:
    """Data of a cell besides its verdicts.

    From ``names`` on it is the evidence of its training, which ``evidence.cells`` fills in.

    Attributes:
        suite: The name of the suite.
        driver: The suite's driver.
        cell: The cell's id.
        place: The suite's node id.
        not_applicable: The checks without a verdict, each with the reason.
        cost: The fields of ``cost.Cost``; None for a number that JSON does not have.
        runs: The ids of the runs that its checks read.
        names: The parameters, each with its name in the unwrapped model, in the live one and in
            files.
        dtypes: The dtypes of each kind of tensor, as promised and as seen.
        mesh: The ranks at their coordinates, and the parts of the parameters that they hold; None
            for a plain list of ranks.
        steps: Curves such as the loss: a number for each step.
        memory: The peak memory of each rank, in bytes.
        tensor_bytes: The bytes of each kind of tensor, by rank.
        sent: What rank 0 sends in a step, by kind of collective and mesh dimension, if an extension
            adds it.
        values: What a training in float32 computes and saves, to the last bit: ``digests``,
            ``numbers`` and ``files``.
    """

    suite: str
    driver: str
    cell: str
    place: str = ""
    not_applicable: dict[str, str] = field(default_factory=dict)
    cost: dict[str, float | None] = field(default_factory=dict)
    runs: list[str] = field(default_factory=list)
    names: list[dict[str, Any]] = field(default_factory=list)
    dtypes: list[dict[str, Any]] = field(default_factory=list)
    mesh: dict[str, Any] | None = None
    steps: dict[str, list[float | None]] = field(default_factory=dict)
    memory: list[int] = field(default_factory=list)
    tensor_bytes: dict[str, list[int]] = field(default_factory=dict)
    sent: list[dict[str, Any]] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, verdict: Verdict, **more: Any) -> Row:
        """Return the row of the verdict's cell."""
        return cls(verdict.suite, verdict.driver, verdict.cell, verdict.place, **more)


@dataclass(frozen=True)
class AddedEvidence:
    """Evidence of a training that an extension adds to the row of its cell.

    Attributes:
        name: A name, which no other extension has.
        add: Fills in fields of the row, from the run of the training.
    """

    name: str
    add: Callable[[Row, RunTrace], None]


#: The evidence of extensions.
ADDED_EVIDENCE: Registry[AddedEvidence] = Registry(
    "pytest_distcompat.evidence", AddedEvidence, "evidence", has_modules=False
)


#: A check, and the reason for which it is not applicable.
_CheckAndReason = tuple[str, str]


def not_applicable_reasons(rows: Iterable[Row]) -> dict[_CheckAndReason, list[str]]:
    """Return the cells in which a check is not applicable, by check and reason."""
    cells: dict[_CheckAndReason, list[str]] = {}
    for row in rows:
        for check, reason in row.not_applicable.items():
            cells.setdefault((check, reason), []).append(row.cell)
    return cells


#: The key of a verdict in a table.
_CellAndCheck = tuple[str, str]
K = TypeVar("K")


def keep_worst(verdicts: dict[K, Verdict], key: K, verdict: Verdict) -> None:
    """Put a verdict under a key, unless one that is as bad or worse is there."""
    earlier = verdicts.get(key)
    if earlier is None or verdict.status.weight > earlier.status.weight:
        verdicts[key] = verdict


@dataclass(frozen=True)
class Table:
    """Matrix of one suite: a row for each cell, a column for each check.

    Attributes:
        results: All verdicts of the suite.
        checks: The columns.
        cells: The rows.
        verdicts: The verdict by (cell, check); there may be none for a pair.
    """

    results: tuple[Verdict, ...]
    checks: tuple[str, ...]
    cells: tuple[str, ...]
    verdicts: dict[_CellAndCheck, Verdict]

    @classmethod
    def of(cls, results: Iterable[Verdict], order: Iterable[str] = ()) -> Table:
        """Return the matrix of a suite's results; of several on a check in a cell it has the worst.

        Args:
            results: The verdicts of one suite.
            order: The order of the checks; by default ``check_order`` of the results.
        """
        all_results = tuple(results)
        worst: dict[_CellAndCheck, Verdict] = {}
        # A dict, because it keeps the order and has each cell only once.
        cells: dict[str, None] = {}
        checks_with_verdict: set[str] = set()
        for result in all_results:
            keep_worst(worst, (result.cell, result.check), result)
            cells[result.cell] = None
            checks_with_verdict.add(result.check)
        all_checks = order or check_order(all_results)
        checks = [check for check in all_checks if check in checks_with_verdict]
        return cls(all_results, tuple(checks), tuple(cells), worst)

    @property
    def title(self) -> str:
        """Return the name of the suite, and its driver."""
        first = self.results[0]
        return f"{first.suite} (driver {first.driver})"

    def word(self, cell: str, check: str) -> str:
        """Return the word of the verdict, empty where there is none."""
        verdict = self.verdicts.get((cell, check))
        if verdict is None:
            return ""
        return verdict.status.word


def tables(results: Iterable[Verdict]) -> list[Table]:
    """Return the matrix of each suite, in the order of first appearance.

    All have their checks in the same order.
    """
    results_of_suites = by_suite(results)
    # Suite by suite, in whatever order their items ran.
    sorted_results = []
    for suite_results in results_of_suites:
        sorted_results += suite_results
    order = check_order(sorted_results)
    return [Table.of(suite_results, order) for suite_results in results_of_suites]


def by_suite(results: Iterable[Verdict]) -> list[list[Verdict]]:
    """Return the verdicts of each suite, the suites in the order of first appearance."""
    results_by_suite: dict[tuple[str, str], list[Verdict]] = {}
    for result in results:
        suite = (result.suite, result.place)
        results_by_suite.setdefault(suite, []).append(result)
    return list(results_by_suite.values())


def check_order(results: Iterable[Verdict]) -> list[str]:
    """Return all checks in the order that they have in their cells.

    Where cells differ in it, the check that appears first is first.
    """
    earlier_by_check = _earlier_checks(results)
    order: list[str] = []
    while earlier_by_check:
        check = _next_check(earlier_by_check, order)
        order.append(check)
        del earlier_by_check[check]
    return order


def _earlier_checks(results: Iterable[Verdict]) -> dict[str, set[str]]:
    """Return, for each check, the checks that come before it in any cell.

    Args:
        results: The verdicts. Those of one cell follow each other.
    """
    earlier_by_check: dict[str, set[str]] = {}
    cell: tuple[str, str] | None = None
    checks_of_cell: list[str] = []
    for result in results:
        if (result.place, result.cell) != cell:
            cell = (result.place, result.cell)
            checks_of_cell = []
        earlier_by_check.setdefault(result.check, set()).update(checks_of_cell)
        checks_of_cell.append(result.check)
    return earlier_by_check


def _next_check(earlier_by_check: Mapping[str, set[str]], order: Iterable[str]) -> str:
    """Return the first check whose earlier ones are all in the order.

    If cells contradict each other, there may be none; then the first of all is returned.
    """
    placed = set(order)
    for check, earlier in earlier_by_check.items():
        if earlier <= placed | {check}:
            return check
    first, *_ = earlier_by_check
    return first


def by_reason(results: Iterable[Verdict], status: str) -> dict[str, list[str]]:
    """Return the cells, with the check if it ran, of each reason for a status."""
    # The names are keys, each once.
    names_by_reason: dict[str, dict[str, None]] = {}
    for result in results:
        if result.status != status:
            continue
        name = result.cell
        if status != "skipped":
            name = f"{result.cell}:{result.check}"
        names = names_by_reason.setdefault(result.why, {})
        names[name] = None
    return {reason: list(names) for reason, names in names_by_reason.items()}


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
        name = f"{self.cell}:{self.check}"
        return f"{name} ({self.driver}): {self.what}"

    @property
    def what(self) -> str:
        """Return the words of the two statuses, and why."""
        before = _word(self.before)
        after = _word(self.after)
        change = f"{before} -> {after}"
        if not self.why:
            return change
        return f"{change}: {self.why}"


def _word(status: str) -> str:
    if not status:
        return "none"
    return Status.from_name(status).word
