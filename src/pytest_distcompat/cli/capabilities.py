"""Capabilities of drivers: the cells that can run here, why others cannot, and known issues.

``distcompat doctor`` calls ``capability`` for each *driver* (a trainer under test, as
``accelerate``) and prints ``Capability.lines``, without running anything::

    accelerate: 512 of the 700 cells of the full profile
               fp32  bf16_upcast
      ddp      yes   yes
      fsdp2    yes   -

A *cell* is a configuration with an id such as ``fsdp2-fp32-w2-tp_2``: strategy, precision, 2 ranks,
options. The *full profile* has every strategy and precision, and every option by itself. Some
options make a *mesh*: they arrange the ranks in several dimensions, as tensor parallelism (``tp``).
A *check* is a claim about a cell, which may not apply to it. A *known issue* is a bug of another
project, for which a failure is expected.
"""

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
from pytest_distcompat.known import KnownIssue, applying, is_about_driver, names_in_issues
from pytest_distcompat.precisions import PRECISIONS
from pytest_distcompat.scenario import MESH
from pytest_distcompat.strategies import STRATEGIES

#: The name of each check to the reason why it does not apply to a cell; None if it does.
WhyNotByCheck = dict[str, str | None]


@dataclass(frozen=True)
class Capability:
    """What one driver can run: the cells of the full profile, and the checks on meshes.

    Attributes:
        driver: The driver's name.
        reasons: Each cell of the full profile to the reason why it cannot run; None if it can.
        known: The cells that can run and that, by a known issue, are refused or fail in every
            check.
        checks: Each cell that can run on a mesh of several dimensions to the reasons why checks do
            not apply; empty if nobody asked for it.
    """

    driver: str
    reasons: dict[Cell, str | None] = field(default_factory=dict)
    known: frozenset[Cell] = frozenset()
    checks: dict[Cell, WhyNotByCheck] = field(default_factory=dict)

    @property
    def able(self) -> int:
        """The number of cells that can run."""
        return sum(not reason for reason in self.reasons.values())

    def lines(self, *, whole: bool) -> Iterator[str]:
        """Yield a line with the number of cells, and a table of strategies by precisions.

        Args:
            whole: Whether to add the tables of mesh options, and why cells and checks are left out.
        """
        total = len(self.reasons)
        yield f"{self.driver}: {self.able} of the {total} cells of the full profile"
        yield from table(("", *PRECISIONS.names()), self._rows_of_strategies())
        if not whole:
            return
        yield from table(("cells that can run", *STRATEGIES.names()), self._rows_of_meshes())
        yield from self._checks()
        yield from self._unsupported()

    def _rows_of_strategies(self) -> Iterator[list[str]]:
        """Yield a row for each strategy: in which precisions it can run without options."""
        # The full profile has a cell without options for each strategy and precision.
        words: dict[tuple[str, str], str] = {}
        for cell, reason in self.reasons.items():
            if not cell.options:
                words[cell.strategy, cell.precision] = self._word(cell, reason)
        for strategy in STRATEGIES.names():
            row = [strategy]
            for precision in PRECISIONS.names():
                row.append(words[strategy, precision])
            yield row

    def _word(self, cell: Cell, reason: str | None) -> str:
        """Return a cell's word in a table; ``reason`` is why it cannot run, None if it can."""
        if reason:
            return "-"
        if cell in self.known:
            return "known"
        return "yes"

    def _unsupported(self) -> Iterator[str]:
        """Yield a line for each reason why cells cannot run, the most frequent first."""
        cells_by_reason: dict[str, list[Cell]] = {}
        for cell, reason in self.reasons.items():
            if reason:
                cells_by_reason.setdefault(reason, []).append(cell)

        def number_of_cells(reason: str) -> int:
            return len(cells_by_reason[reason])

        for reason in sorted(cells_by_reason, key=number_of_cells, reverse=True):
            ids = [cell.id for cell in cells_by_reason[reason]]
            yield f"    {len(ids)} not: {reason} [{_first_of(ids)}]"

    def _rows_of_meshes(self) -> Iterator[list[str]]:
        """Yield a row for each set of mesh options: how many cells of each strategy can run."""
        for mesh, cells in _by_mesh(self.reasons).items():
            able: Counter[str] = Counter()
            for cell in cells:
                if not self.reasons[cell]:
                    able[cell.strategy] += 1
            row = [mesh]
            for strategy in STRATEGIES.names():
                row.append(str(able[strategy] or "-"))
            yield row

    def _checks(self) -> Iterator[str]:
        """Yield a table of checks by mesh options, then why checks do not apply.

        The table has the number of cells to which a check applies, or a dash if there is none. The
        reason is that of the first such cell.
        """
        cells_by_mesh = _by_mesh(self.checks)
        if not cells_by_mesh:
            return
        rows = []
        places_by_reason: dict[str, list[str]] = {}
        for name in CHECKS.names():
            row = [name]
            for mesh, cells in cells_by_mesh.items():
                applies = sum(not self.checks[cell][name] for cell in cells)
                row.append(str(applies or "-"))
                if not applies:
                    reason = str(self.checks[cells[0]][name])
                    places_by_reason.setdefault(reason, []).append(f"{name} under {mesh}")
            rows.append(row)
        yield from table(("checks with a verdict", *cells_by_mesh), rows)
        for reason, places in places_by_reason.items():
            yield f"    no verdict: {reason} [{_first_of(places)}]"


def _first_of(names: Sequence[str]) -> str:
    """Return the first name, with dots if there are more: ``a, ...``."""
    if len(names) > 1:
        return f"{names[0]}, ..."
    return names[0]


def _by_mesh(cells: Iterable[Cell]) -> dict[str, list[Cell]]:
    """Return the cells that have mesh options, by the names of these, such as ``tp x pp``."""
    cells_by_mesh: dict[str, list[Cell]] = {}
    for cell in cells:
        mesh_options = []
        for name, _ in cell.options:
            if name in MESH:
                mesh_options.append(name)
        if mesh_options:
            mesh = " x ".join(mesh_options)
            cells_by_mesh.setdefault(mesh, []).append(cell)
    return cells_by_mesh


def capability(
    name: str,
    driver: type[Driver],
    device: str,
    world_size: int,
    issues: Iterable[KnownIssue] = (),
    *,
    whole: bool = True,
) -> Capability:
    """Return which cells of the full profile the driver can run.

    Args:
        name: The driver's name.
        driver: The driver.
        device: ``cuda`` or ``cpu``.
        world_size: The number of ranks of each cell.
        issues: Known issues of the installed libraries.
        whole: Whether to find out which checks apply, too, which takes longer.
    """
    names = (STRATEGIES.names(), PRECISIONS.names())
    cells = profiles.cells(
        "full", Matrix(), driver=driver, names=names, world_size=world_size, device=device
    )
    reasons = {cell: unsupported_reason(driver, cell, device) for cell in cells}
    applicable = applying(issues, names_in_issues(driver), device)
    whole_cell_issues = list(filter(_concerns_whole_cells, applicable))
    known = set()
    for cell in cells:
        if not reasons[cell] and _is_covered(cell, whole_cell_issues):
            known.add(cell)
    checks = _checks_on_meshes(driver, reasons) if whole else {}
    return Capability(name, reasons, frozenset(known), checks)


def _is_covered(cell: Cell, whole_cell_issues: Iterable[Expectation]) -> bool:
    """Tell whether any of these issues covers the cell."""
    # The name of any check will do, because these issues cover all checks of a cell.
    return any(issue.covers(cell, "active") for issue in whole_cell_issues)


def _concerns_whole_cells(issue: Expectation) -> bool:
    """Tell whether every cell that the issue covers is refused, or fails in every check."""
    # Another issue is about one check, or is over since its last day.
    if issue.check != "*" or issue.ended:
        return False
    # A strict one fails in all cells that it covers. One that is not strict need not show in each:
    # it is about some models or options, which its cells do not name.
    return issue.strict or issue.kind == "refuses"


def _checks_on_meshes(
    driver: type[Driver], reasons: dict[Cell, str | None]
) -> dict[Cell, WhyNotByCheck]:
    """Return why checks do not apply in the cells that can run on a mesh of several dimensions.

    Args:
        driver: The driver of the cells.
        reasons: Why each cell cannot run; None if it can.

    Returns:
        The reasons by cell and name of the check; None for a check that applies.
    """
    checks: dict[Cell, WhyNotByCheck] = {}
    for cells in _by_mesh(reasons).values():
        for cell in cells:
            if reasons[cell]:
                continue
            reasons_of_cell: WhyNotByCheck = {}
            for check in CHECKS.by_name.values():
                reasons_of_cell[check.name] = not_applicable(check, cell, driver, {})
            checks[cell] = reasons_of_cell
    return checks


def issues_here(
    issues: Iterable[KnownIssue], drivers: Sequence[type[Driver]], device: str
) -> list[tuple[KnownIssue, list[str]]]:
    """Return the issues that are present on the device, each with the names of its drivers.

    An issue is present if the installed versions have the bug and its last day is not over.

    Args:
        issues: The known issues.
        drivers: The drivers to look at; an issue without any of them is left out.
        device: ``cuda`` or ``cpu``.
    """
    applicable = []
    for issue in issues:
        names = []
        for driver in drivers:
            if is_about_driver(issue, driver):
                names.append(driver.name)
        if names and issue.applies_on(device) and not issue.ended:
            applicable.append((issue, names))
    return applicable
