"""What takes the place of ranks in a session: processes without peers, say. An extension makes it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from pytest_distcompat.cell import Cell
from pytest_distcompat.driver import Driver
from pytest_distcompat.launch.launcher import Launcher


class Substitute(Protocol):
    """The place of the ranks of all runs of suites; marked tests need ranks, and are skipped.

    Attributes:
        name: What it is, in messages.
        option: The option that asks for it.
        world_size: The number of ranks of each cell.
        title: The line about it in pytest's output.
        needs_ranks: Why marked tests are skipped.
    """

    name: str
    option: str
    world_size: int
    title: str
    needs_ranks: str

    def launcher(self) -> Launcher:
        """Return the launcher of all runs."""

    def cells(self, cells: Iterable[Cell]) -> list[Cell]:
        """Return the cells as they run here, each once. Raises UsageProblem if one cannot be made."""

    def why_not_supported(self, driver: type[Driver], cell: Cell) -> str | None:
        """Return why a cell cannot run here; None if it can."""

    def why_not_checked(self, check: str) -> str | None:
        """Return why the check of that name has no verdict here; None if it has one."""
