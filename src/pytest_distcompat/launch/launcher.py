"""What a launcher is, for those who are handed one."""

from __future__ import annotations

from typing import Protocol

from pytest_distcompat.launch.ending import Ending
from pytest_distcompat.launch.request import Request


class Launcher(Protocol):
    """What starts ranks."""

    def warm_up(self) -> None:
        """Begin to get ready, without waiting for it."""

    def get_warm(self) -> str:
        """Wait until ready; what went wrong, if something did. ``run`` does so too."""

    def run(self, request: Request) -> Ending:
        """Start the ranks, wait until they ended or were ended; never raises for what the ranks do."""

    def close(self) -> None:
        """End what is still running."""
