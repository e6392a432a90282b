"""Where the runs of a session are: all on this machine, unless an extension places them elsewhere.

A *run* is one process group from start to end; its processes are *ranks*. Its *spread* says how
many ranks it has, and over how many machines they are spread: ``Spread(world_size=4, nodes=2)``.
``DistcompatSession.placement`` is a ``Placement`` of this module, or the one that an extension
returns from the hook ``pytest_distcompat_placement``. The core asks it for the spread of each test
and for the launcher, and notes all tests after collection.
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
    """The placement of all runs on this machine; extensions have subclasses.

    Attributes:
        machines: Over how many machines a test of this session is spread at most, as far as tests
            were noted.
        machines_of_workers: Over how many machines the runs of xdist workers are dealt out. This is
            1 unless each worker has a machine of its own.
        hint: The end of the message that ranks cannot be spread evenly, for a test whose mark does
            not say over how many machines. Empty here.
    """

    machines_of_workers = 1
    hint = ""

    def __init__(self) -> None:
        self.machines = 1

    @property
    def elsewhere(self) -> bool:
        """Tell whether any noted test needs other machines than this one."""
        return self.machines > 1

    def spread(self, world_size: int, nodes: int | None) -> Spread:
        """Return the spread of a test.

        Args:
            world_size: The number of its ranks.
            nodes: The number of machines that its mark names; None if it names none.
        """
        return Spread(world_size, nodes or 1)

    def spread_matrix(self, matrix: Matrix) -> Matrix:
        """Return a suite's matrix with the number of machines that the session has.

        A matrix that names a number of machines itself stays as it is. Here the session has none to
        add.
        """
        return matrix

    def note(self, spread: Spread, *, shares: bool) -> None:  # noqa: ARG002 - for subclasses
        """Note a test of this session.

        Args:
            spread: Its spread.
            shares: Whether its ranks need a directory that all of them see.
        """
        # A test with an uneven spread will be skipped.
        if not spread.uneven:
            self.machines = max(self.machines, spread.nodes)

    # The warmth is for subclasses.
    def launcher(self, local: Launcher, warmth: Warmth) -> Launcher:  # noqa: ARG002
        """Return the launcher of all runs.

        Args:
            local: The launcher that starts ranks on this machine.
            warmth: What processes import before ranks start, for launchers on other machines.

        Raises:
            pytest.UsageError: A test needs other machines, and no extension starts ranks there.
        """
        if self.elsewhere:
            raise pytest.UsageError("tests over several nodes need the plugin distcompat-cluster")
        return local
