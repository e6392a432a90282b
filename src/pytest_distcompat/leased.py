"""Launcher that leases devices for each run, before another launcher starts its ranks.

A *lease* is the right of one process group to use some GPUs, or slots of the CPU, until its ranks
have ended (``lease.Pool``). All pytest processes of a user ask for leases, so that no two process
groups share a device, unless the user lets them. ``plugin.session``, ``engine`` and the agents of
``ext.cluster`` on other machines put a ``LeasedLauncher`` around the launcher that starts ranks,
such as ``launch.warm``. Callers see a launcher that may wait.

There are two ways to use a launcher. ``run`` starts ranks for one request and waits for their end.
``open`` starts ranks that stay, and get one request after the other: an *open run*. Its devices are
leased until it is concluded. For each request its caller makes a ``Watchdog``, which ends ranks
that hang, and calls ``wait``; then ``ending`` if the ranks go on, or ``conclude`` if they are gone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any

from pytest_distcompat.launch import nccl
from pytest_distcompat.launch.forensics.ending import Ending
from pytest_distcompat.launch.forensics.watchdog import Watchdog
from pytest_distcompat.launch.launcher import Launcher, OpenRun, Replies
from pytest_distcompat.launch.request import Request
from pytest_distcompat.lease import Leak, Lease, Pool
from pytest_distcompat.world import RANKS_PER_GPU


def leak_message(leak: Leak) -> str:
    """Return the message about memory that a run leaked."""
    return f"{leak.bytes >> 20} MiB stayed in use on {leak.id} after the ranks were gone"


def inherited_leak_message(leak: Leak) -> str:
    """Return the message about memory that the previous holder, which was killed, has leaked."""
    return f"{leak.who}, whose process died: {leak_message(leak)}"


def rank_environment(lease: Lease, ranks: int) -> dict[str, str]:
    """Return the environment variables for so many ranks on a lease.

    They say which devices the ranks see: ``{"CUDA_VISIBLE_DEVICES": "0,3", ...}``. There are none
    on the CPU.
    """
    environment = dict(lease.environment)
    if lease.places > 1:
        # Ranks that may share a GPU with other runs divide its memory (``World.divide_memory``).
        environment[RANKS_PER_GPU] = str(lease.places)
    if environment and ranks > len(lease.ids):
        # Several of these ranks are on one GPU, which NCCL must be told to allow.
        environment |= nccl.environment_of_shared_ranks()
    return environment


class LeasedLauncher(Launcher):
    """Launcher that runs another one on leased devices."""

    def __init__(
        self, launcher: Launcher, pool: Callable[[], Pool], notice: Callable[[str], None]
    ) -> None:
        """Lease nothing yet.

        Args:
            launcher: Starts the ranks.
            pool: Returns the pool of devices; it is called when the first run begins.
            notice: Shows the user a line, about leaked memory.
        """
        self._launcher = launcher
        self._pool = pool
        self._notice = notice
        #: The lease of the run that goes on; None between runs.
        self._lease: Lease | None = None
        #: Ends that lease when it is closed.
        self._held = contextlib.ExitStack()

    def warm_up(self) -> None:
        """Start to get ready, which needs no devices."""
        self._launcher.warm_up()

    def get_warm(self) -> str:
        """Wait until the launcher is ready; return what is wrong with it, if anything."""
        return self._launcher.get_warm()

    def run(self, request: Request) -> Ending:
        """Start the ranks when there are devices for all of them, or raise LeaseTimeout."""
        # Imports take seconds and need no device, so other runs can use them. ``run`` reports what
        # goes wrong.
        self._launcher.get_warm()
        environment = self._take(request)
        leaks: tuple[str, ...] = ()
        try:
            ending = self._launcher.run(with_variables(request, environment))
        finally:
            leaks = self.give_back()
        return dataclasses.replace(ending, leaks=leaks)

    @property
    def can_open(self) -> bool:
        """Tell whether the launcher can hold a run open."""
        return self._launcher.can_open

    def open(self, request: Request, target: str) -> OpenRun:
        """Start ranks that get requests, when there are devices for them.

        They hold these devices until they are gone.

        Args:
            request: The first request. The ranks start with its environment.
            target: The function that each rank calls (``module:function``) to get requests.
        """
        environment = self._take(request)
        try:
            run = self._launcher.open(with_variables(request, environment), target)
        except BaseException:
            self.give_back()
            raise
        return LeasedRun(self, run, environment)

    def _take(self, request: Request) -> dict[str, str]:
        """Lease devices for a run, and return the variables that its ranks need for them."""
        # The launcher process of an open run may have died: then nobody has ended its lease.
        for message in self.give_back():
            self._notice(message)
        who = current_item() or request.directory
        leasing = self._pool().lease(request.world_size, who=who)
        # This waits until the devices are free.
        self._lease = self._held.enter_context(leasing)
        for leak in self._lease.leak:
            self._notice(inherited_leak_message(leak))
        return rank_environment(self._lease, request.world_size)

    def give_back(self) -> tuple[str, ...]:
        """End the lease, if there is one.

        Return messages about memory that stayed in use on its devices.
        """
        lease = self._lease
        self._lease = None
        # This waits until the ranks' memory is free, and fills in ``lease.own_leak``.
        self._held.close()
        if lease is None:
            return ()
        return tuple([leak_message(leak) for leak in lease.own_leak])

    def close(self) -> None:
        """End all processes that still run."""
        self._launcher.close()
        self.give_back()


class LeasedRun(OpenRun):
    """An open run on leased devices, which are given back when it is concluded.

    All methods pass on to the run itself.
    """

    def __init__(
        self, launcher: LeasedLauncher, run: OpenRun, environment: Mapping[str, str]
    ) -> None:
        self._launcher = launcher
        self._run = run
        self._environment = environment
        #: The request with which the ranks were started.
        self.start_request = run.start_request
        #: The socket to which the ranks connect for further requests.
        self.listener = run.listener

    @property
    def open(self) -> bool:
        """Tell whether the run goes on."""
        return self._run.open

    def adapted(self, request: Request) -> Request:
        """Return a request with the changes that these ranks need, those for their devices too."""
        return self._run.adapted(with_variables(request, self._environment))

    def wait(self, watch: Watchdog, replies: Replies | None = None) -> Mapping[str, Any] | None:
        """Wait until all ranks have ended, or all replies have come.

        Return what torchrun's agent says after the ranks have ended, else None.
        """
        return self._run.wait(watch, replies)

    def ending(self, watch: Watchdog, *, notice: str = "") -> Ending:
        """Return how the watched request has ended, though its ranks go on."""
        return self._run.ending(watch, notice=notice)

    def conclude(self, watch: Watchdog, answer: Mapping[str, Any] | None) -> Ending:
        """Return how the watched request ended, with the memory that its ranks leaked.

        ``answer`` is what ``wait`` returned.
        """
        ending = self._run.conclude(watch, answer)
        return dataclasses.replace(ending, leaks=self._launcher.give_back())


def with_variables(request: Request, variables: Mapping[str, str]) -> Request:
    """Return the request with these environment variables beside its own."""
    return dataclasses.replace(request, set={**request.set, **variables})


def current_item() -> str:
    """Return the id of the pytest item that runs in this process; empty outside of one.

    pytest has ``test_a.py::test_b (call)`` in the environment.
    """
    # https://docs.pytest.org/en/stable/example/simple.html#pytest-current-test-environment-variable
    return os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]
