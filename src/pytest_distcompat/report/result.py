"""Tables of verdicts, rows of cells and changes of verdicts, as reports have them.

A report is made of *verdicts* (``status.Verdict``): passed, failed, known and so on, each of one
*check* in one *cell* of a suite. A cell is a configuration of the trainer with an id such as
``fsdp2-fp32-w2`` (strategy, precision, 2 ranks). This module has what the formats of a report
share:

- ``Row``: all that is known about a cell besides its verdicts. ``report.document`` stores it.
- ``Table``: the matrix of a suite, cells by checks. The terminal, Markdown and HTML show it.
- ``Change``: a verdict in two reports. ``report.compare`` makes it.
"""

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

    From ``names`` on it is the evidence of its training, which ``evidence.cells`` fills in at the
    end of the session. Without a training these fields are empty.

    Attributes:
        suite: The name of the suite, as ``TestMyTrainer``.
        driver: The suite's driver, the trainer under test, as ``accelerate``.
        cell: The cell's id.
        place: The suite's node id, as ``tests/test_a.py::TestMyTrainer``.
        not_applicable: The name of each check without a verdict to the reason.
        cost: The fields of ``cost.Cost``, as ``{"step_seconds": 0.16}``; None for a number that
            JSON does not have.
        runs: The ids of the runs that its checks read. A run is one process group from start to
            end.
        names: An entry for each parameter: its name in the ``unwrapped`` model (before any strategy
            wraps it), in the ``live`` one, the ``files`` that have it, and ``shape``, ``dtype``,
            ``placement`` and so on.
        dtypes: An entry for each ``kind`` of tensor: the dtype that is ``expected``, and those
            ``seen``, as ``{"kind": "gradient", "expected": "float32", "seen": ["float32"]}``.
        mesh: The ranks at their coordinates, and the parts of the parameters that they hold; None
            for a plain list of ranks.
        steps: Curves by name: ``{"loss": [4.85, 4.86, ...]}``, a number for each step.
        memory: The peak memory of each rank, in bytes.
        tensor_bytes: ``parameters``, ``gradients`` and ``optimizer`` to their bytes on each rank.
        sent: What rank 0 sends in a step, by kind of collective and mesh dimension, if an extension
            adds it.
        values: What a training in float32 computes and saves, to the last bit: ``digests``,
            ``numbers`` and ``files``, as ``report.values`` explains them.
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
        """Return the row of the verdict's cell; ``more`` are further fields."""
        return cls(verdict.suite, verdict.driver, verdict.cell, verdict.place, **more)


@dataclass(frozen=True)
class AddedEvidence:
    """Evidence of a training that an extension adds to the row of its cell.

    Attributes:
        name: A name, which no other extension has.
        add: Fills in fields of the row, from what the ranks of the training recorded.
    """

    name: str
    add: Callable[[Row, RunTrace], None]


#: The evidence of extensions, which are found by entry points of that group.
ADDED_EVIDENCE: Registry[AddedEvidence] = Registry(
    "pytest_distcompat.evidence", AddedEvidence, "evidence", has_modules=False
)


#: A check, and the reason for which it is not applicable: it has nothing to say in some cells.
_CheckAndReason = tuple[str, str]


def not_applicable_reasons(rows: Iterable[Row]) -> dict[_CheckAndReason, list[str]]:
    """Return (check, reason) to the cells in which the check is not applicable for that reason."""
    cells: dict[_CheckAndReason, list[str]] = {}
    for row in rows:
        for check, reason in row.not_applicable.items():
            cells.setdefault((check, reason), []).append(row.cell)
    return cells


#: The key of a verdict in a table: ``("fsdp2-fp32-w2", "names")``.
_CellAndCheck = tuple[str, str]
#: The type of a key.
K = TypeVar("K")


def keep_worst(verdicts: dict[K, Verdict], key: K, verdict: Verdict) -> None:
    """Put a verdict under a key, unless the one that is there is as bad or worse.

    A verdict that ran counts as worse than a skipped one.
    """
    earlier = verdicts.get(key)
    if earlier is None or verdict.status.weight > earlier.status.weight:
        verdicts[key] = verdict


@dataclass(frozen=True)
class Table:
    """Matrix of one suite: a row for each cell, a column for each check.

    ``report.settings`` makes tables with other rows and columns: settings by strategies.

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
        """Return the word of the verdict, as ``FAIL``; empty where there is none."""
        verdict = self.verdicts.get((cell, check))
        if verdict is None:
            return ""
        return verdict.status.word


def tables(results: Iterable[Verdict]) -> list[Table]:
    """Return the matrix of each suite, the suites in the order of first appearance.

    All matrices have their checks in the same order.
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
    """Return the names of all checks in the order that they have in their cells.

    No cell has all checks: ``names resume`` in one and ``names units resume`` in another give
    ``names units resume``. Where cells contradict each other, the check that appears first is
    first.

    Args:
        results: The verdicts. Those of one cell follow each other.
    """
    earlier_by_check = _earlier_checks(results)
    order: list[str] = []
    while earlier_by_check:
        check = _next_check(earlier_by_check, order)
        order.append(check)
        del earlier_by_check[check]
    return order


def _earlier_checks(results: Iterable[Verdict]) -> dict[str, set[str]]:
    """Return each check to the checks that come before it in any cell.

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
    """Return the next check of the order: the first one whose earlier checks are all in it.

    If cells contradict each other, there may be none; then the first of all is returned.

    Args:
        earlier_by_check: The checks that are not in the order yet, see ``_earlier_checks``.
        order: The checks that are.
    """
    placed = set(order)
    for check, earlier in earlier_by_check.items():
        if earlier <= placed | {check}:
            return check
    first, *_ = earlier_by_check
    return first


def by_reason(results: Iterable[Verdict], status: str) -> dict[str, list[str]]:
    """Return each reason for a status to the verdicts that have it.

    Args:
        results: The verdicts.
        status: The status, as ``known``.

    Returns:
        For example ``{"https://github.com/...": ["fsdp2-fp32-w2:resume"]}``. A verdict is named by
        cell and check, a skipped one by its cell alone, since all checks of the cell are skipped.
    """
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
    """A verdict that changed between two reports."""

    suite: str
    driver: str
    cell: str
    check: str
    #: The name of the status in the earlier report, as ``passed``; empty if it had no verdict.
    before: str
    #: The name of the status in the later report; empty if it has no verdict.
    after: str
    #: The message or the reason of the later verdict, or why there is none.
    why: str = ""

    def __str__(self) -> str:
        """Return the change as one line."""
        name = f"{self.cell}:{self.check}"
        return f"{name} ({self.driver}): {self.what}"

    @property
    def what(self) -> str:
        """Return the words of the two statuses, and why: ``ok -> FAIL: 3 parameters ...``."""
        before = _word(self.before)
        after = _word(self.after)
        change = f"{before} -> {after}"
        if not self.why:
            return change
        return f"{change}: {self.why}"


def _word(status: str) -> str:
    """Return the word of a status in matrices, ``none`` for no verdict."""
    if not status:
        return "none"
    return Status.from_name(status).word
