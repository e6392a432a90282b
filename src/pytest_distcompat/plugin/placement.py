"""Where the runs of a session are.

All are on this machine, unless an extension places them elsewhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_distcompat.cell import Matrix
from pytest_distcompat.spread import Spread

if TYPE_CHECKING:
    from pytest_distcompat.launch.launcher import Launcher
    from pytest_distcompat.launch.request import Warmth


class Placement:
    """The placement of all runs on this machine.

    An extension has a subclass of its own (``pytest_distcompat_placement``).

    Attributes:
        machines: Over how many machines a test of this session is spread at most.
        machines_of_workers: Over how many machines the runs of xdist workers are dealt out.
        hint: What follows on a message that ranks cannot be spread evenly, for a test whose mark
            does not say how.
    """

    machines_of_workers = 1
    hint = ""

    def __init__(self) -> None:
        self.machines = 1

    @property
    def elsewhere(self) -> bool:
        """Tell whether runs of this session are on other machines than this one."""
        return self.machines > 1

    def spread(self, world_size: int, nodes: int | None) -> Spread:
        """Return the spread of a test with that many ranks.

        ``nodes`` is the number of machines that its mark names.
        """
        return Spread(world_size, nodes or 1)

    def spread_matrix(self, matrix: Matrix) -> Matrix:
        """Return a matrix whose cells are spread as the session says.

        A matrix that names a number of machines itself stays as it is.
        """
        return matrix

    def note(self, spread: Spread, *, shares: bool) -> None:  # noqa: ARG002 - for subclasses
        """Note a test of this session.

        ``shares`` says that its ranks need a directory that all of them see.
        """
        if not spread.uneven:
            self.machines = max(self.machines, spread.nodes)

    # The warmth is for subclasses.
    def launcher(self, local: Launcher, warmth: Warmth) -> Launcher:  # noqa: ARG002
        """Return the launcher of all runs; ``local`` starts ranks on this machine.

        Raises:
            pytest.UsageError: There is none for the tests of this session.
        """
        if self.elsewhere:
            raise pytest.UsageError("tests over several nodes need the plugin distcompat-cluster")
        return local
