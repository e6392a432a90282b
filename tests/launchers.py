"""A base class for test launchers that start no process: they are ready at once and have nothing to end."""

from __future__ import annotations

from pytest_distcompat.launch.launcher import OpenRun
from pytest_distcompat.launch.request import Request


class WithoutProcesses:
    """Every method that a launcher needs, except ``run``."""

    can_open = False

    def warm_up(self) -> None:
        """Do nothing."""

    def get_warm(self) -> str:
        """Return an empty reason: the launcher is warm."""
        return ""

    def open(self, request: Request, target: str) -> OpenRun:
        """Not asked for."""
        raise NotImplementedError

    def close(self) -> None:
        """Do nothing."""
