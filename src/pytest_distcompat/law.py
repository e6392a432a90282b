"""``Law``: how checks judge a cell. An extension may judge some cells in another way than the rest.

A law says which cells a driver can run, which runs a check reads, what its findings are, and which
failures are expected. Nearly all cells are judged by ``PLAIN``. For cells with settings, for
example, an extension has a law of its own: where two settings contradict each other, it allows
either to win.

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
    """The part of ``checks.Check`` that laws use."""

    @property
    def name(self) -> str:
        """Return the name of the check."""

    @property
    def costly(self) -> bool:
        """Tell whether it takes several runs that no other check reads."""

    def runs(self, cell: Cell, driver: Any) -> Scenario:
        """Return the runs that the check reads in a cell."""

    def findings(self, cell: Cell, trace: Trace) -> list[str]:
        """Return the findings, each once; none if the claim holds."""

    def claim(self, cell: Cell, trace: Trace) -> Iterable[str]:
        """Yield the findings as they come."""


class Law:
    """The plain law: a check has its own runs and findings, and what is declared is expected.

    An extension inherits it and overrides what differs for the cells that it covers.
    """

    name = "plain"
    #: Of several laws that cover a cell, the one with the lowest order is its law.
    order = 0

    def covers(self, cell: Cell) -> bool:  # noqa: ARG002 - for those who override it
        """Tell whether this is the law of that cell."""
        return True

    def unsupported_reason(self, driver: Any, cell: Cell) -> str | None:
        """Return why a driver that supports the cell's options cannot run it; None if it can.

        The plain law knows no settings, so a cell that has some cannot run.

        Args:
            driver: A subclass of ``Driver``.
            cell: The cell.
        """
        if not cell.set:
            return None
        owner, _, _ = cell.set[0].partition(".")
        return f"the {driver.name or driver.__name__} driver has no {owner} under {cell.strategy}"

    def runs(self, cell: Cell, scenario: Scenario) -> Scenario:  # noqa: ARG002
        """Return the runs that a check reads in the cell, given those that it reads by itself."""
        return scenario

    def findings(self, check: CheckLike, cell: Cell, trace: Trace) -> list[str]:
        """Return the findings of a check in the cell; none if the claim holds."""
        return check.findings(cell, trace)

    def expectations(
        self,
        expectations: Sequence[Expectation],
        failure: RunFailure | None,  # noqa: ARG002
    ) -> list[Expectation]:
        """Return which failures are expected in the cell.

        Args:
            expectations: The failures that are declared for it.
            failure: How its first run that failed ended; None if none failed.
        """
        return list(expectations)

    def read_at_checkpoints(self, cell: Cell) -> tuple[str, ...]:  # noqa: ARG002
        """Return the cell's options that matter only while a checkpoint is saved or loaded."""
        return ()

    def left_out(
        self,
        cell: Cell,  # noqa: ARG002
        checks: Mapping[str, CheckLike],  # noqa: ARG002
        profile: str,  # noqa: ARG002
    ) -> dict[str, str]:
        """Return the reasons why a profile does not run checks in the cell, by the checks' names.

        Args:
            cell: The cell.
            checks: The checks that apply to it, by name.
            profile: The name of the profile.
        """
        return {}


PLAIN = Law()
LAWS: Registry[Law] = Registry("pytest_distcompat.laws", Law, "law", has_modules=False)


def law_of(cell: Cell) -> Law:
    """Return the law of a cell: the first that covers it, else the plain one."""
    for law in LAWS.by_name.values():
        if law.covers(cell):
            return law
    return PLAIN
