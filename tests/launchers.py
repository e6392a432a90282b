"""Base of test launchers that start no process: ready at once, with nothing to end."""

from __future__ import annotations

from pytest_distcompat.launch.launcher import OpenRun
from pytest_distcompat.launch.request import Request


class WithoutProcesses:
    """All that a launcher must be able to do, but for ``run``."""

    can_open = False

    def warm_up(self) -> None:
        """Nothing."""

    def get_warm(self) -> str:
        """It is."""
        return ""

    def open(self, request: Request, target: str) -> OpenRun:
        """Not asked for."""
        raise NotImplementedError

    def close(self) -> None:
        """Nothing."""
