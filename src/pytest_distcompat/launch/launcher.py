"""What a launcher is, for those who are handed one."""

from __future__ import annotations

from typing import Protocol

from pytest_distcompat.launch.ending import Ending
from pytest_distcompat.launch.kept import Keeping
from pytest_distcompat.launch.request import Request


class Launcher(Protocol):
    """What starts ranks."""

    def warm_up(self) -> None:
        """Begin to get ready, without waiting for it."""

    def get_warm(self) -> str:
        """Wait until ready; what went wrong, if something did. ``run`` does so too."""

    def run(self, request: Request, keep: Keeping | None = None) -> Ending:
        """Start the ranks, wait until they ended or were ended; never raises for what the ranks do.

        With ``keep`` the ranks may be those of an earlier request, and may wait for the next one.
        """

    @property
    def keeping(self) -> str:
        """The scope of the ranks that wait for a request; empty if there are none."""

    def retire(self) -> str:
        """Have ranks that wait leave, if there are any; what went wrong, if something did."""

    def close(self) -> None:
        """End what is still running."""
