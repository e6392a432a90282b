"""Capabilities of drivers: the cells that can run here, why others cannot, and the known issues that apply."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from pytest_distcompat import profiles
from pytest_distcompat.cell import Cell, Matrix
from pytest_distcompat.checks import CHECKS
from pytest_distcompat.cli.output import table
from pytest_distcompat.driver import Driver
from pytest_distcompat.drivers import unsupported_reason
from pytest_distcompat.engine import not_applicable
from pytest_distcompat.expect import Expectation
from pytest_distcompat.known import KnownIssue, applying, concerned
from pytest_distcompat.precisions import PRECISIONS
from pytest_distcompat.scenario import MESH
from pytest_distcompat.strategies import STRATEGIES


@dataclass(frozen=True)
class Capability:
    """Cells that one driver can run.

    ``reasons`` maps each cell of the full profile to the reason why it cannot run, None if it can. ``known`` are the cells
    that can run and are known to be refused, or to fail in every check. ``checks`` has the reasons of checks without a
    verdict, None for those with one, of the cells that can run on a mesh of several dimensions.
    """

    driver: str
    reasons: dict[Cell, str | None] = field(default_factory=dict)
    known: frozenset[Cell] = frozenset()
    checks: dict[Cell, dict[str, str | None]] = field(default_factory=dict)

    @property
    def able(self) -> int:
        """Return how many cells can run."""
        return sum(not reason for reason in self.reasons.values())

    def lines(self, *, whole: bool) -> Iterator[str]:
        """Yield a table of strategies by precisions; ``whole``: with the reasons, each with the number of its cells."""
        yield f"{self.driver}: {self.able} of the {len(self.reasons)} cells of the full profile"
        yield from table(("", *PRECISIONS.names()), self._plain_cells())
        if not whole:
            return
        yield from table(("cells that can run", *STRATEGIES.names()), self._axes())
        yield from self._checks()
        yield from self._unsupported()

    def _plain_cells(self) -> Iterator[list[str]]:
        """Yield a row for each strategy: whether its cell without options can run in each precision."""
        words: dict[tuple[str, str], str] = {}
        for cell, reason in self.reasons.items():
            if not cell.options:
                words[cell.strategy, cell.precision] = self._word(cell, reason)
        for strategy in STRATEGIES.names():
            yield [strategy, *(words[strategy, precision] for precision in PRECISIONS.names())]

    def _word(self, cell: Cell, reason: str | None) -> str:
        """Return what the table says of a cell, which cannot run if there is a reason."""
        if reason:
            return "-"
        if cell in self.known:
            return "known"
        return "yes"

    def _unsupported(self) -> Iterator[str]:
        """Yield the reasons why cells cannot run, that of most cells first."""
        cells_by_reason: dict[str, list[Cell]] = {}
        for cell, reason in self.reasons.items():
            if reason:
                cells_by_reason.setdefault(reason, []).append(cell)
        for reason in sorted(
            cells_by_reason, key=lambda reason: len(cells_by_reason[reason]), reverse=True
        ):
            cells = cells_by_reason[reason]
            yield f"    {len(cells)} not: {reason} [{_first_of([cell.id for cell in cells])}]"

    def _axes(self) -> Iterator[tuple[str, ...]]:
        """Yield a row for each combination of mesh options: how many cells of each strategy can run, "-" if none can."""
        for axes, cells in _by_axes(self.reasons).items():
            able = Counter(cell.strategy for cell in cells if not self.reasons[cell])
            yield axes, *(str(able[strategy] or "-") for strategy in STRATEGIES.names())

    def _checks(self) -> Iterator[str]:
        """Yield a table of checks by combinations of mesh options, how many of the cells have a verdict; then the reasons."""
        cells_by_axes = _by_axes(self.checks)
        if not cells_by_axes:
            return
        rows = []
        places_by_reason: dict[str, list[str]] = {}
        for name in CHECKS.names():
            row = [name]
            for axes, cells in cells_by_axes.items():
                with_verdict = sum(not self.checks[cell][name] for cell in cells)
                row.append(str(with_verdict or "-"))
                if not with_verdict:
                    reason = str(self.checks[cells[0]][name])
                    places_by_reason.setdefault(reason, []).append(f"{name} under {axes}")
            rows.append(row)
        yield from table(("checks with a verdict", *cells_by_axes), rows)
        for reason, places in places_by_reason.items():
            yield f"    no verdict: {reason} [{_first_of(places)}]"


def _first_of(names: Sequence[str]) -> str:
    """Return the first name, with dots if there are more."""
    if len(names) > 1:
        return f"{names[0]}, ..."
    return names[0]


def _by_axes(cells: Iterable[Cell]) -> dict[str, list[Cell]]:
    """Return the cells on a mesh of several dimensions by the names of their mesh options."""
    cells_by_axes: dict[str, list[Cell]] = {}
    for cell in cells:
        axes = " x ".join(name for name, _ in cell.options if name in MESH)
        if axes:
            cells_by_axes.setdefault(axes, []).append(cell)
    return cells_by_axes


def capability(
    name: str,
    driver: type[Driver],
    device: str,
    world_size: int,
    issues: Iterable[KnownIssue] = (),
    *,
    whole: bool = True,
) -> Capability:
    """Return which cells of the full profile the driver can run on the device; ``whole``: with their checks."""
    names = (STRATEGIES.names(), PRECISIONS.names())
    cells = profiles.cells(
        "full", Matrix(), driver=driver, names=names, world_size=world_size, device=device
    )
    reasons = {cell: unsupported_reason(driver, cell, device) for cell in cells}
    able = [cell for cell in cells if not reasons[cell]]
    applicable = applying(issues, concerned(driver), device)
    whole_cell_issues = [issue for issue in applicable if _concerns_whole_cells(issue)]
    known = set()
    for cell in able:
        if any(issue.covers(cell, "active") for issue in whole_cell_issues):
            known.add(cell)
    checks = _checks_on_meshes(driver, reasons) if whole else {}
    return Capability(name, reasons, frozenset(known), checks)


def _concerns_whole_cells(issue: Expectation) -> bool:
    """Tell whether a cell that the issue covers is refused, or fails in every check."""
    if issue.check != "*" or issue.ended:
        return False
    # An issue that only may fail is about few models or options, which its cells do not name.
    return issue.strict or issue.kind == "refuses"


def _checks_on_meshes(
    driver: type[Driver], reasons: dict[Cell, str | None]
) -> dict[Cell, dict[str, str | None]]:
    """Return why each check has no verdict in the cells that can run on a mesh of several dimensions.

    Args:
        driver: the driver of the cells.
        reasons: each cell with the reason why it cannot run, None if it can.

    Returns:
        The reasons by cell and name of the check; None for a check with a verdict.
    """
    checks: dict[Cell, dict[str, str | None]] = {}
    for cells in _by_axes(reasons).values():
        for cell in cells:
            if not reasons[cell]:
                checks[cell] = {
                    check.name: not_applicable(check, cell, driver, {})
                    for check in CHECKS.by_name.values()
                }
    return checks


def issues_here(
    issues: Iterable[KnownIssue], drivers: Sequence[type[Driver]], device: str
) -> list[tuple[KnownIssue, list[str]]]:
    """Return the issues of the installed versions on that device, each with the drivers that they concern."""
    applicable = []
    for issue in issues:
        names = [driver.name for driver in drivers if set(concerned(driver)) & set(issue.drivers)]
        if names and issue.there(device) and not issue.ended:
            applicable.append((issue, names))
    return applicable
