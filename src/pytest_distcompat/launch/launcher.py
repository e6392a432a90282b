"""The protocol of launchers."""

from __future__ import annotations

from typing import Protocol

from pytest_distcompat.launch.forensics.ending import Ending
from pytest_distcompat.launch.request import Request
from pytest_distcompat.launch.reused_ranks import Reuse


class Launcher(Protocol):
    """A launcher: starts ranks. By default it prepares nothing, and each request has ranks of its own."""

    def warm_up(self) -> None:
        """Begin to get ready, without waiting for it."""
        return

    def get_warm(self) -> str:
        """Wait until ready, as ``run`` does too, and return what went wrong; empty if nothing did."""
        return ""

    def run(self, request: Request, reuse: Reuse | None = None) -> Ending:
        """Start the ranks, and wait until they ended or were ended.

        It never raises for what the ranks do. With ``reuse`` the ranks may be those of an earlier request, and may wait for the
        next one.
        """

    @property
    def reuse_scope(self) -> str:
        """The scope of the ranks that wait for a request; empty if there are none."""
        return ""

    def retire(self) -> str:
        """End the ranks that wait for a request, if there are any, and return what went wrong."""
        return ""

    def close(self) -> None:
        """End what is still running."""
        return
