"""Capabilities of drivers: the cells that can run here, why others cannot, and the known issues that apply."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from pytest_distcompat import profiles
from pytest_distcompat.cell import Cell, Matrix
from pytest_distcompat.cli.output import table
from pytest_distcompat.driver import Driver
from pytest_distcompat.drivers._declared import unsupported_reason
from pytest_distcompat.known import KnownIssue, applying, concerned
from pytest_distcompat.precisions import PRECISIONS
from pytest_distcompat.scenario import MESH
from pytest_distcompat.strategies import STRATEGIES

#: How many reasons are shown without ``--all``, the most frequent first.
SHOWN_REASONS = 3


@dataclass(frozen=True)
class Capability:
    """Cells that one driver can run.

    ``reasons`` maps each cell of the full profile to the reason why it cannot run, None if it can. ``known`` are the cells
    that can run and are known to be refused, or to fail in every check.
    """

    driver: str
    reasons: dict[Cell, str | None] = field(default_factory=dict)
    known: frozenset[Cell] = frozenset()

    @property
    def able(self) -> int:
        """Return how many cells can run."""
        return sum(not reason for reason in self.reasons.values())

    def lines(self, *, whole: bool) -> Iterator[str]:
        """Yield a table of strategies by precisions, then the reasons, each with the number of its cells."""
        yield f"{self.driver}: {self.able} of the {len(self.reasons)} cells of the full profile"
        words = {
            (cell.strategy, cell.precision): "-" if reason else "known" if cell in self.known else "yes"
            for cell, reason in self.reasons.items()
            if not cell.options
        }
        names = PRECISIONS.names()
        yield from table(("", *names), [(one, *(words[one, name] for name in names)) for one in STRATEGIES.names()])
        if whole:
            yield from table(("cells that can run", *STRATEGIES.names()), self._axes())
        by_reason: dict[str, list[Cell]] = {}
        for cell, reason in self.reasons.items():
            if reason:
                by_reason.setdefault(reason, []).append(cell)
        ordered = sorted(by_reason.items(), key=lambda pair: len(pair[1]), reverse=True)
        for reason, cells in ordered if whole else ordered[:SHOWN_REASONS]:
            yield f"    {len(cells)} not: {reason} [{cells[0].id}{', ...' * (len(cells) > 1)}]"
        if len(ordered) > SHOWN_REASONS and not whole:
            left = sum(len(cells) for _, cells in ordered[SHOWN_REASONS:])
            yield f"    {left} not for {len(ordered) - SHOWN_REASONS} reasons more: --all"

    def _axes(self) -> Iterator[tuple[str, ...]]:
        """Yield a row for each combination of mesh options: how many cells of each strategy can run, "-" if none can."""
        found: dict[str, list[Cell]] = {}
        for cell in self.reasons:
            if names := [name for name, _ in cell.options if name in MESH]:
                found.setdefault(" x ".join(names), []).append(cell)
        for axes, cells in found.items():
            able = Counter(cell.strategy for cell in cells if not self.reasons[cell])
            yield axes, *(str(able[one] or "-") for one in STRATEGIES.names())


def capability(
    name: str, driver: type[Driver], device: str, world_size: int, issues: Iterable[KnownIssue] = ()
) -> Capability:
    """Return which cells of the full profile the driver can run on the device."""
    names = (STRATEGIES.names(), PRECISIONS.names())
    cells = profiles.cells("full", Matrix(), driver=driver, names=names, world_size=world_size, device=device)
    reasons = {cell: unsupported_reason(driver, cell, device) for cell in cells}
    for_all_checks = [one for one in applying(issues, concerned(driver), device) if one.check == "*" and not one.ended]
    known = (cell for cell in cells if not reasons[cell] and any(one.covers(cell, "active") for one in for_all_checks))
    return Capability(name, reasons, frozenset(known))


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
