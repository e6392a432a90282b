"""Launcher that leases devices for each run: no two process groups share one, unless the user lets them."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable

from pytest_distcompat.launch import nccl
from pytest_distcompat.launch.forensics.ending import Ending
from pytest_distcompat.launch.launcher import Launcher
from pytest_distcompat.launch.request import Request
from pytest_distcompat.launch.reused_ranks import Reuse
from pytest_distcompat.lease import Leak, Lease, Pool
from pytest_distcompat.world import RANKS_PER_GPU


def leak_message(leak: Leak) -> str:
    """Return the message about memory that a run leaked."""
    return f"{leak.bytes >> 20} MiB stayed in use on {leak.id} after the ranks were gone"


def inherited_leak_message(leak: Leak) -> str:
    """Return the message about memory that was leaked before the lease began, by a process that was killed."""
    return f"{leak.who}, whose process died: {leak_message(leak)}"


def rank_environment(lease: Lease, ranks: int) -> dict[str, str]:
    """Return the variables for so many ranks on a lease: the devices they see and, if they share GPUs, NCCL's consent.

    Ranks that may share a GPU with other runs are told of how many, since they divide its memory.
    """
    environment = dict(lease.environment)
    if lease.places > 1:
        environment[RANKS_PER_GPU] = str(lease.places)
    if environment and ranks > len(lease.ids):
        environment |= nccl.environment_of_shared_ranks()
    return environment


class LeasedLauncher:
    """Launcher that runs another one on leased devices; ``pool`` is called when the first run begins."""

    def __init__(
        self, launcher: Launcher, pool: Callable[[], Pool], notice: Callable[[str], None]
    ) -> None:
        self._launcher = launcher
        self._pool = pool
        self._notice = notice
        self._lease: Lease | None = None
        self._held = contextlib.ExitStack()

    def warm_up(self) -> None:
        """Start to get ready, which needs no devices."""
        self._launcher.warm_up()

    def get_warm(self) -> str:
        """Wait until the launcher is ready; return what is wrong with it, if anything."""
        return self._launcher.get_warm()

    def run(self, request: Request, reuse: Reuse | None = None) -> Ending:
        """Start the ranks when there are devices for all of them, or raise LeaseTimeout. Kept ranks keep their devices."""
        if self._lease is None or reuse is None or reuse.scope != self.reuse_scope:
            # Imports take seconds and need no device, so other runs can use them. ``run`` reports what goes wrong.
            self._launcher.get_warm()
            problem = self.retire()
            if problem:
                self._notice(f"ranks that were kept did not leave well: {problem}")
            who = current_item() or request.directory
            self._lease = self._held.enter_context(self._pool().lease(request.world_size, who=who))
            for leak in self._lease.leak:
                self._notice(inherited_leak_message(leak))
        leaks: tuple[Leak, ...] = ()
        environment = {**request.set, **rank_environment(self._lease, request.world_size)}
        try:
            ending = self._launcher.run(dataclasses.replace(request, set=environment), reuse)
        finally:
            if not self._launcher.reuse_scope:
                leaks = self._give_back()
        return dataclasses.replace(ending, leaks=tuple(map(leak_message, leaks)))

    @property
    def reuse_scope(self) -> str:
        """Return the scope of the ranks that wait for a request; empty if there are none."""
        return self._launcher.reuse_scope

    def retire(self) -> str:
        """End the ranks that wait and give their devices back; return what went wrong, if anything."""
        problem = self._launcher.retire()
        for leak in self._give_back():
            # It cannot be known which of the tests that shared the ranks leaked.
            self._notice(f"ranks that {leak.who} and later tests shared: {leak_message(leak)}")
        return problem

    def _give_back(self) -> tuple[Leak, ...]:
        """End the lease, if there is one; return the memory that stayed in use on its devices."""
        lease, self._lease = self._lease, None
        self._held.close()
        return lease.own_leak if lease is not None else ()

    def close(self) -> None:
        """End all processes that still run."""
        self._launcher.close()
        self._give_back()


def current_item() -> str:
    """Return the id of the item that runs in this process; empty outside of one."""
    # https://docs.pytest.org/en/stable/example/simple.html#pytest-current-test-environment-variable
    return os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]
