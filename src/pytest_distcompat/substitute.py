"""Protocol of what takes the place of the ranks of a session.

An extension may return a substitute from the pytest hook ``pytest_distcompat_substitute``, if its
command-line option is given. One is an extension that runs a single process in place of a large
number of ranks, on fake tensors. ``plugin.session`` then uses the substitute's launcher for all
suites, and ``plugin.suite`` asks it which cells it can run and which checks it can decide.
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

        With ``world_size`` 1024, ``fsdp2-fp32-w2`` and ``fsdp2-fp32-w4`` both become the one cell
        ``fsdp2-fp32-w1024``.

        Raises:
            UsageProblem: If a cell has no counterpart.
        """

    def why_not_supported(self, driver: type[Driver], cell: Cell) -> str | None:
        """Return why the substitute cannot run a cell; None if it can.

        Args:
            driver: The class by which the suite of the cell tests a trainer.
            cell: The cell.
        """

    def why_not_checked(self, check: str) -> str | None:
        """Return why the substitute cannot decide the check of that name; None if it can."""
