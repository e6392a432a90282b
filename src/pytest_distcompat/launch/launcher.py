"""Protocols of launchers, and of runs whose ranks perform several requests one after the other.

A launcher starts the ranks of a run (one process group from start to end) and returns how they
ended. Implementations are ``warm.WarmLauncher`` (the default), ``torchrun.TorchrunLauncher``, those
of extensions, for several machines or for what stands in for ranks, and
``leased.LeasedLauncher``, which leases devices and calls another one. ``runner`` and
``plugin/marked/run`` call ``run(request)``; ``ext/reuse`` calls ``open``, for ranks that tests
share.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any, Protocol

from pytest_distcompat.launch.forensics.ending import Ending
from pytest_distcompat.launch.forensics.watchdog import Watchdog
from pytest_distcompat.launch.request import Request


class Launcher(Protocol):
    """Starts the ranks of runs. By default it prepares nothing, and has no open runs."""

    def warm_up(self) -> None:
        """Begin to prepare for runs, without waiting for it."""
        return

    def get_warm(self) -> str:
        """Wait until runs can start, and return what went wrong; empty if nothing did.

        ``run`` waits too, so a caller of ``run`` need not call it.
        """
        return ""

    def run(self, request: Request) -> Ending:
        """Start ranks, wait until they have ended or were killed, and return how they ended.

        It never raises for what the ranks do.
        """

    @property
    def can_open(self) -> bool:
        """Whether ``open`` may be called."""
        return False

    def open(self, request: Request, target: str) -> OpenRun:  # noqa: ARG002 - the launchers' protocol
        """Start ranks that wait for requests, and return their run, which goes on.

        Call it when ``get_warm`` has returned without a problem, and only if ``can_open``. Until
        the run is concluded the launcher runs nothing else.

        Args:
            request: The first request. The ranks start with its environment.
            target: The function that the ranks call, as ``module:function``. Its payload is
                ``{"socket": path}``: the ranks connect to that socket, and get requests on it. Each
                request brings its working directory and import path.
        """
        assert self.can_open
        raise NotImplementedError

    def close(self) -> None:
        """End what is still running."""
        return


class Replies(Protocol):
    """The replies of an open run's ranks to a request, which arrive on sockets.

    ``OpenRun.wait`` gets such an object. It calls ``receive`` until all replies are ``complete``.
    """

    @property
    def sockets(self) -> list[socket.socket]:
        """The sockets on which replies may arrive."""

    def receive(self) -> list[socket.socket]:
        """Read what has arrived; return the sockets on which more may arrive."""

    @property
    def complete(self) -> bool:
        """Whether all replies have arrived."""


class OpenRun(Protocol):
    """A run whose ranks perform one request after the other.

    For each request the caller makes a ``Watchdog`` and calls ``wait``. If the ranks go on, it
    calls ``ending`` afterwards. If they end, it calls ``conclude``, and the run is over. It is over
    too when its launcher is closed.

    Attributes:
        start_request: The request with which the ranks were started.
        listener: The socket to which the ranks connect.
    """

    start_request: Request
    listener: socket.socket

    @property
    def open(self) -> bool:
        """Whether the ranks may get further requests."""

    def adapted(self, request: Request) -> Request:
        """Return the request with the changes of environment that these ranks need for it.

        The environment of pytest's process may have changed since they were started.
        """

    def wait(self, watch: Watchdog, replies: Replies | None = None) -> Mapping[str, Any] | None:
        """Wait until all ranks have ended or, with ``replies``, until all replies have arrived.

        Args:
            watch: The watchdog of the request, which ends ranks that hang.
            replies: The replies to wait for.

        Returns:
            The answer of torchrun's agent, which started the ranks, after they have ended; None if
            the replies have arrived, or if the watchdog has ended the ranks and the agent does not
            answer.
        """

    def ending(self, watch: Watchdog, *, notice: str = "") -> Ending:
        """Return how a request has ended after which the ranks go on.

        Args:
            watch: The watchdog of the request.
            notice: What the user should know, for ``Ending.notice``.
        """

    def conclude(self, watch: Watchdog, answer: Mapping[str, Any] | None) -> Ending:
        """Return how the last request has ended, when the ranks are gone.

        The run is no longer open.

        Args:
            watch: The watchdog of the request.
            answer: What ``wait`` returned.
        """
