"""What takes the place of the ranks of a session.

Processes without peers may do so, for example. An extension supplies one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from pytest_distcompat.cell import Cell
from pytest_distcompat.driver import Driver
from pytest_distcompat.launch.launcher import Launcher


class Substitute(Protocol):
    """Runs the cells of all suites of a session without starting ranks.

    Marked tests run on real ranks only. In a session with a substitute they are skipped.

    Attributes:
        name: A noun for messages, such as ``replay``.
        option: The command-line option that turns the substitute on.
        world_size: The number of ranks of each cell.
        title: The line of pytest's header that announces the substitute.
        needs_ranks: The reason with which marked tests are skipped.
    """

    name: str
    option: str
    world_size: int
    title: str
    needs_ranks: str

    def launcher(self) -> Launcher:
        """Return the launcher that performs all runs of the session."""

    def cells(self, cells: Iterable[Cell]) -> list[Cell]:
        """Return the cells of a suite as the substitute runs them, without duplicates.

        Raises:
            UsageProblem: If a cell has no counterpart.
        """

    def why_not_supported(self, driver: type[Driver], cell: Cell) -> str | None:
        """Return why the substitute cannot run a cell; None if it can."""

    def why_not_checked(self, check: str) -> str | None:
        """Return why the substitute cannot decide the check of that name; None if it can."""
