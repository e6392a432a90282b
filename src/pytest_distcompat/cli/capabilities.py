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
from pytest_distcompat.drivers._declared import unsupported_reason
from pytest_distcompat.engine import not_applicable
from pytest_distcompat.grouping import grouped
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
        words = {
            (cell.strategy, cell.precision): "-" if reason else "known" if cell in self.known else "yes"
            for cell, reason in self.reasons.items()
            if not cell.options
        }
        names = PRECISIONS.names()
        yield from table(("", *names), [(one, *(words[one, name] for name in names)) for one in STRATEGIES.names()])
        if not whole:
            return
        yield from table(("cells that can run", *STRATEGIES.names()), self._axes())
        yield from self._checks()
        by_reason = grouped((reason, cell) for cell, reason in self.reasons.items() if reason)
        ordered = sorted(by_reason.items(), key=lambda pair: len(pair[1]), reverse=True)
        for reason, cells in ordered:
            yield f"    {len(cells)} not: {reason} [{cells[0].id}{', ...' * (len(cells) > 1)}]"

    def _axes(self) -> Iterator[tuple[str, ...]]:
        """Yield a row for each combination of mesh options: how many cells of each strategy can run, "-" if none can."""
        for axes, cells in _by_axes(self.reasons).items():
            able = Counter(cell.strategy for cell in cells if not self.reasons[cell])
            yield axes, *(str(able[one] or "-") for one in STRATEGIES.names())

    def _checks(self) -> Iterator[str]:
        """Yield a table of checks by combinations of mesh options, how many of the cells have a verdict; then the reasons."""
        by_axes = _by_axes(self.checks)
        rows = []
        why: dict[str, list[str]] = {}
        for name in CHECKS.names() if by_axes else ():
            with_verdict = [[cell for cell in cells if not self.checks[cell][name]] for cells in by_axes.values()]
            rows.append((name, *(str(len(cells) or "-") for cells in with_verdict)))
            for axes, some, cells in zip(by_axes, with_verdict, by_axes.values(), strict=True):
                if not some:
                    why.setdefault(str(self.checks[cells[0]][name]), []).append(f"{name} under {axes}")
        yield from table(("checks with a verdict", *by_axes), rows) if rows else ()
        for reason, places in why.items():
            yield f"    no verdict: {reason} [{places[0]}{', ...' * (len(places) > 1)}]"


def _by_axes(cells: Iterable[Cell]) -> dict[str, list[Cell]]:
    """Return the cells on a mesh of several dimensions by the names of their mesh options."""
    named = ((" x ".join(name for name, _ in cell.options if name in MESH), cell) for cell in cells)
    return grouped((names, cell) for names, cell in named if names)


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
    cells = profiles.cells("full", Matrix(), driver=driver, names=names, world_size=world_size, device=device)
    reasons = {cell: unsupported_reason(driver, cell, device) for cell in cells}
    here = [one for one in applying(issues, concerned(driver), device) if one.check == "*" and not one.ended]
    # An issue that only may fail is about few models or options, which its cells do not name.
    for_all_checks = [one for one in here if one.strict or one.kind == "refuses"]
    known = (cell for cell in cells if not reasons[cell] and any(one.covers(cell, "active") for one in for_all_checks))
    checks = {
        cell: {check.name: not_applicable(check, cell, driver, {}) for check in CHECKS.by_name.values()}
        for cells in _by_axes(reasons).values()
        for cell in cells
        if whole and not reasons[cell]
    }
    return Capability(name, reasons, frozenset(known), checks)


def issues_here(
    issues: Iterable[KnownIssue], drivers: Sequence[type[Driver]], device: str
) -> list[tuple[KnownIssue, list[str]]]:
    """Return the issues of the installed versions on that device, each with the drivers that they concern."""
    found = []
    for issue in issues:
        hit = [driver.name for driver in drivers if set(concerned(driver)) & set(issue.drivers)]
        if hit and issue.there(device) and not issue.ended:
            found.append((issue, hit))
    return found
