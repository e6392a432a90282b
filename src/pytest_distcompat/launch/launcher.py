"""The protocols of launchers, and of runs that they hold open."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any, Protocol

from pytest_distcompat.launch.forensics.ending import Ending
from pytest_distcompat.launch.forensics.watchdog import Watchdog
from pytest_distcompat.launch.request import Request


class Launcher(Protocol):
    """A launcher: starts ranks. By default it prepares nothing, and holds no run open."""

    def warm_up(self) -> None:
        """Begin to get ready, without waiting for it."""
        return

    def get_warm(self) -> str:
        """Wait until ready, as ``run`` does too, and return what went wrong; empty if nothing did."""
        return ""

    def run(self, request: Request) -> Ending:
        """Start the ranks, and wait until they ended or were ended; never raises for what the ranks do."""

    @property
    def can_open(self) -> bool:
        """Tell whether ``open`` may be called."""
        return False

    def open(self, request: Request, target: str) -> OpenRun:  # noqa: ARG002 - the launchers' protocol
        """Start ranks that get requests, and return their run while it goes on.

        Until it is concluded the launcher runs nothing else. ``get_warm`` has said that it is ready.

        Args:
            request: The first request that the ranks will get; they start as if for it alone.
            target: The function that they call, as ``module:function``. Its payload has the path of
                a ``socket`` on which requests come; each brings working directory and import path.
        """
        assert self.can_open
        raise NotImplementedError

    def close(self) -> None:
        """End what is still running."""
        return


class Replies(Protocol):
    """What the ranks of an open run send over their sockets."""

    @property
    def sockets(self) -> list[socket.socket]:
        """The sockets on which something may arrive."""

    def receive(self) -> list[socket.socket]:
        """Read what has arrived, and return the sockets on which more may arrive."""

    @property
    def complete(self) -> bool:
        """Tell whether all has arrived that is waited for."""


class OpenRun(Protocol):
    """A run whose ranks get requests, until it is concluded or its launcher is closed.

    Attributes:
        start_request: The request that the ranks were started with.
        listener: The socket on which they connect.
    """

    start_request: Request
    listener: socket.socket

    @property
    def open(self) -> bool:
        """Tell whether the run goes on."""

    def adapted(self, request: Request) -> Request:
        """Return a request with the changes that these ranks need to do it as if started for it."""

    def wait(self, watch: Watchdog, replies: Replies | None = None) -> Mapping[str, Any] | None:
        """Wait until all ranks have ended or, with ``replies``, all of these have come.

        Returns:
            The agent's answer once the ranks have ended; None if the replies have come, or if the
            watchdog acted and the agent does not answer.
        """

    def ending(self, watch: Watchdog, *, notice: str = "") -> Ending:
        """Return how the watched request has ended, though its ranks go on."""

    def conclude(self, watch: Watchdog, answer: Mapping[str, Any] | None) -> Ending:
        """Return how the watched request ended, once the ranks are gone; the run is no longer open."""
