"""``Law``: how checks judge a cell. An extension may judge some cells in another way than the rest.

A cell is one point of the test matrix, such as ``fsdp2-bf16_upcast-w2``. Nearly all cells are
judged by ``PLAIN``: a check reads the runs that it names, and a failure is a failure unless it is
declared.

An extension may add cells for which that is not right. The profile ``sweep``, for example, sets
each field of a library's configuration in a cell of its own, ``...-set_AdamW.eps=0.5``. If two
settings contradict each other, either may win. So it has a law of its own, which covers cells with
settings. An entry point in the group ``pytest_distcompat.laws`` names an instance of ``Law``.

``law_of`` returns the law of a cell. Its methods are called by drivers and profiles (which cells
and checks run), by checks (which runs), and by the judge (expectations, findings).
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
    """The part of ``checks.Check`` that laws use, as ``checks`` itself imports this module."""

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
        """Yield the findings, perhaps with repetitions."""


class Law:
    """The plain law: a check has its own runs and findings, and what is declared is expected.

    An extension inherits it and overrides what differs for the cells that it covers.
    """

    #: The name in the registry.
    name = "plain"
    #: If several laws cover a cell, the one with the lowest order is its law.
    order = 0

    def covers(self, cell: Cell) -> bool:  # noqa: ARG002 - for those who override it
        """Tell whether this is the law of that cell."""
        return True

    def unsupported_reason(self, driver: Any, cell: Cell) -> str | None:
        """Return why a driver that supports the cell's options cannot run it; None if it can.

        A setting is a field of a library's object, ``AdamW.eps=0.5``. No driver knows settings by
        itself, so a cell that has some cannot run under the plain law.

        Args:
            driver: A subclass of ``Driver``, the class by which a trainer is tested.
            cell: The cell.
        """
        if not cell.set:
            return None
        owner, _, _ = cell.set[0].partition(".")
        return f"the {driver.name or driver.__name__} driver has no {owner} under {cell.strategy}"

    def runs(self, cell: Cell, scenario: Scenario) -> Scenario:  # noqa: ARG002
        """Return the runs that a check reads in the cell; ``scenario`` has those that it names."""
        return scenario

    def findings(self, check: CheckLike, cell: Cell, trace: Trace) -> list[str]:
        """Return the findings of a check in the cell; none if the claim holds."""
        return check.findings(cell, trace)

    def expectations(
        self,
        expectations: Sequence[Expectation],
        failure: RunFailure | None,  # noqa: ARG002
    ) -> list[Expectation]:
        """Return the expectations by which the judge decides.

        Args:
            expectations: Those that are declared for the check in the cell.
            failure: The failure of the first run that failed; None if none failed.
        """
        return list(expectations)

    def read_at_checkpoints(self, cell: Cell) -> tuple[str, ...]:  # noqa: ARG002
        """Return the names of the cell's options that matter only in a save or a load.

        Checks of checkpoints then run in the cell although it has these options.
        """
        return ()

    def left_out(
        self,
        cell: Cell,  # noqa: ARG002
        checks: Mapping[str, CheckLike],  # noqa: ARG002
        profile: str,  # noqa: ARG002
    ) -> dict[str, str]:
        """Return name of a check -> why the profile does not run it in the cell.

        Args:
            cell: The cell.
            checks: Name -> check, of all checks that apply to the cell.
            profile: The name of the profile, a choice of cells and checks: ``default``.
        """
        return {}


#: The law of all cells that no other law covers.
PLAIN = Law()
#: The laws of extensions.
LAWS: Registry[Law] = Registry("pytest_distcompat.laws", Law, "law", has_modules=False)


def law_of(cell: Cell) -> Law:
    """Return the law of a cell: the first of extensions that covers it, else ``PLAIN``."""
    for law in LAWS.by_name.values():
        if law.covers(cell):
            return law
    return PLAIN
