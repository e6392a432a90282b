"""Laws: what is asked of a cell. Cells are judged by the plain law, unless an extension has one of its own for them.

An entry point in the group ``pytest_distcompat.laws`` names an instance of ``Law``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from pytest_distcompat.cell import Cell
from pytest_distcompat.expect import Expectation
from pytest_distcompat.registry import Registry
from pytest_distcompat.scenario import Scenario
from pytest_distcompat.trace import RunFailure, Trace

if TYPE_CHECKING:
    from collections.abc import Iterable


class CheckLike(Protocol):
    """A check, as laws know it: ``checks.Check``."""

    @property
    def name(self) -> str:
        """Return its name."""

    @property
    def costly(self) -> bool:
        """Tell whether it takes several runs that no other check reads."""

    def runs(self, cell: Cell, driver: Any) -> Scenario:
        """Return the runs that it reads."""

    def findings(self, cell: Cell, trace: Trace) -> list[str]:
        """Return what it finds; nothing if it holds."""

    def claim(self, cell: Cell, trace: Trace) -> Iterable[str]:
        """Yield what it finds, as it comes."""


class Law:
    """The plain law: a check's own runs and findings, and what is expected of them.

    An extension inherits it and overrides what differs for the cells that it covers.
    """

    name = "plain"
    #: Laws are asked in this order whether they cover a cell.
    order = 0

    def covers(self, cell: Cell) -> bool:  # noqa: ARG002 - for those who override it
        """Tell whether it is the law of that cell."""
        return True

    def unsupported_reason(self, driver: Any, cell: Cell) -> str | None:
        """Return why a driver, a subclass of ``Driver``, cannot run the cell, though it has all options; None if it can."""
        for setting in cell.set:
            owner, _, _ = setting.partition(".")
            return (
                f"the {driver.name or driver.__name__} driver has no {owner} under {cell.strategy}"
            )
        return None

    def runs(self, cell: Cell, scenario: Scenario) -> Scenario:  # noqa: ARG002
        """Return the runs of a check that by itself reads those of ``scenario``."""
        return scenario

    def findings(self, check: CheckLike, cell: Cell, trace: Trace) -> list[str]:
        """Return what a check finds; nothing if it holds."""
        return check.findings(cell, trace)

    def expectations(
        self,
        expectations: Sequence[Expectation],
        failure: RunFailure | None,  # noqa: ARG002
    ) -> list[Expectation]:
        """Return what is expected, given what is declared of the cell and how its first failed run ended (None: none did)."""
        return list(expectations)

    def read_at_checkpoints(self, cell: Cell) -> tuple[str, ...]:  # noqa: ARG002
        """Return the options whose values matter only while a checkpoint is written or loaded."""
        return ()

    def left_out(
        self,
        cell: Cell,  # noqa: ARG002
        checks: Mapping[str, CheckLike],  # noqa: ARG002
        profile: str,  # noqa: ARG002
    ) -> dict[str, str]:
        """Return the checks, of these that apply to the cell, that the profile leaves out of it, each with the reason."""
        return {}


PLAIN = Law()
LAWS: Registry[Law] = Registry("pytest_distcompat.laws", Law, "law", has_modules=False)


def law_of(cell: Cell) -> Law:
    """Return the law of a cell: the first that covers it, else the plain one."""
    for law in LAWS.by_name.values():
        if law.covers(cell):
            return law
    return PLAIN
