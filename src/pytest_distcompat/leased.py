"""A launcher that leases the devices of each run first, so that no two process groups share one."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable

from pytest_distcompat.launch import Ending, Launcher, Request, Reuse
from pytest_distcompat.lease import Leak, Lease, Pool


def told(leak: Leak) -> str:
    """What a user reads of a leak."""
    return f"{leak.bytes >> 20} MiB stayed in use on {leak.id} after the ranks were gone"


def inherited(leak: Leak) -> str:
    """The same of one that a lease began with: whoever had the device before was killed."""
    return f"{leak.who}, whose process died: {told(leak)}"


class LeasedLauncher:
    """Another launcher, on leased devices; ``pool`` is called when the first run begins."""

    def __init__(self, launcher: Launcher, pool: Callable[[], Pool], notice: Callable[[str], None]) -> None:
        self._launcher = launcher
        self._pool = pool
        self._notice = notice
        self._lease: Lease | None = None
        self._held = contextlib.ExitStack()

    def warm_up(self) -> None:
        """Begin to get ready: that needs no devices."""
        self._launcher.warm_up()

    def get_warm(self) -> str:
        """Wait until ready."""
        return self._launcher.get_warm()

    def run(self, request: Request, reuse: Reuse | None = None) -> Ending:
        """Start the ranks when there are devices for all of them. Raises LeaseTimeout if there are none in time.

        Ranks that are kept keep their devices.
        """
        if self._lease is None or reuse is None or reuse.scope != self.reuse_scope:
            # Imports take seconds and no device: others run meanwhile. What goes wrong with them, ``run`` says.
            self._launcher.get_warm()
            problem = self.retire()
            if problem:
                self._notice(f"ranks that were kept did not leave well: {problem}")
            who = _current_item() or request.directory
            self._lease = self._held.enter_context(self._pool().lease(request.world_size, who=who))
            for leak in self._lease.leak:
                self._notice(inherited(leak))
        own: tuple[Leak, ...] = ()
        environment = {**request.set, **self._lease.environment}
        try:
            ending = self._launcher.run(dataclasses.replace(request, set=environment), reuse)
        finally:
            if not self._launcher.reuse_scope:
                own = self._give_back()
        return dataclasses.replace(ending, leaks=tuple(map(told, own)))

    @property
    def reuse_scope(self) -> str:
        """The scope of the ranks that wait for a request; empty if there are none."""
        return self._launcher.reuse_scope

    def retire(self) -> str:
        """Have ranks that wait leave, and give their devices back; what went wrong, if something did."""
        problem = self._launcher.retire()
        for leak in self._give_back():
            # Which of the tests that shared them it was, nobody knows.
            self._notice(f"ranks that {leak.who} and later tests shared: {told(leak)}")
        return problem

    def _give_back(self) -> tuple[Leak, ...]:
        """End the lease, if there is one; what stayed in use of what it had."""
        lease, self._lease = self._lease, None
        self._held.close()
        return lease.own_leak if lease is not None else ()

    def close(self) -> None:
        """End what is still running."""
        self._launcher.close()
        self._give_back()


def _current_item() -> str:
    """The id of the item that runs in this process, as pytest tells it; empty outside of one.

    https://docs.pytest.org/en/stable/example/simple.html#pytest-current-test-environment-variable
    """
    return os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]
