"""Which cells can be run here, and why not the others; which known upstream issues are met on the way."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pytest_distcompat import profiles
from pytest_distcompat.cell import Cell, Matrix
from pytest_distcompat.cli.tables import table
from pytest_distcompat.driver import Driver
from pytest_distcompat.drivers._declared import unsupported_reason
from pytest_distcompat.known import KnownIssue, applying, concerned
from pytest_distcompat.precisions import PRECISIONS
from pytest_distcompat.strategies import STRATEGIES

YES, KNOWN, NO = "yes", "known", "-"
#: How many reasons are told, the most frequent first, where not all are asked for.
REASONS = 3


@dataclass(frozen=True)
class Capability:
    """What one driver can run: ``reasons`` maps each cell of the full profile to why it cannot be run, None if it can.

    ``known`` are the cells that can be run and are known to be refused, or to fail in everything.
    """

    driver: str
    reasons: dict[Cell, str | None] = field(default_factory=dict)
    known: frozenset[Cell] = frozenset()

    @property
    def able(self) -> int:
        """How many cells can be run."""
        return sum(not reason for reason in self.reasons.values())

    def word(self, cell: Cell) -> str:
        """What stands in the table."""
        return NO if self.reasons[cell] else KNOWN if cell in self.known else YES

    def lines(self, *, whole: bool) -> Iterator[str]:
        """Strategies by precisions, without options; then the reasons, each with how many cells have it."""
        yield f"{self.driver}: {self.able} of the {len(self.reasons)} cells of the full profile"
        words = {(cell.strategy, cell.precision): self.word(cell) for cell in self.reasons if not cell.options}
        names = PRECISIONS.names()
        yield from table(("", *names), [(one, *(words[one, name] for name in names)) for one in STRATEGIES.names()])
        why: dict[str, list[Cell]] = {}
        for cell, reason in self.reasons.items():
            if reason:
                why.setdefault(reason, []).append(cell)
        ordered = sorted(why.items(), key=lambda pair: len(pair[1]), reverse=True)
        for reason, cells in ordered if whole else ordered[:REASONS]:
            yield f"    {len(cells)} not: {reason} [{cells[0].id}{', ...' * (len(cells) > 1)}]"
        if len(ordered) > REASONS and not whole:
            left = sum(len(cells) for _, cells in ordered[REASONS:])
            yield f"    {left} not for {len(ordered) - REASONS} reasons more: --all"

    def to_json(self) -> dict[str, Any]:
        """The cells that can be run, and the others by reason."""
        cannot: dict[str, list[str]] = {}
        for cell, reason in self.reasons.items():
            if reason:
                cannot.setdefault(reason, []).append(cell.id)
        return {
            "driver": self.driver,
            "can": [cell.id for cell, no in self.reasons.items() if not no],
            "cannot": cannot,
        }


def capability(
    name: str, driver: type[Driver], device: str, world_size: int, issues: Iterable[KnownIssue] = ()
) -> Capability:
    """Every strategy in every precision with every value of every option that the driver speaks."""
    names = (STRATEGIES.names(), PRECISIONS.names())
    cells = profiles.cells("full", Matrix(), driver=driver, names=names, world_size=world_size, device=device)
    reasons = {cell: unsupported_reason(driver, cell, device) for cell in cells}
    wholly = [one for one in applying(issues, concerned(driver), device) if one.check == "*"]
    known = (cell for cell in cells if not reasons[cell] and any(one.covers(cell, "active") for one in wholly))
    return Capability(name, reasons, frozenset(known))


def issues_here(
    issues: Iterable[KnownIssue], drivers: Sequence[type[Driver]], device: str
) -> list[tuple[KnownIssue, list[str]]]:
    """The issues that the installed versions have on that device, each with the drivers through which it shows."""
    found = []
    for issue in issues:
        hit = [driver.name for driver in drivers if set(concerned(driver)) & set(issue.drivers)]
        if hit and issue.there(device):
            found.append((issue, hit))
    return found
