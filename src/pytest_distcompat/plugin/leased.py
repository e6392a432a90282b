"""A launcher that leases the devices of each life first, so that no two process groups share one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from pytest_distcompat.launch import Ending, Launcher, Request
from pytest_distcompat.lease import Pool


class LeasedLauncher:
    """Another launcher, on leased devices; ``pool`` is called when the first life begins."""

    def __init__(self, launcher: Launcher, pool: Callable[[], Pool], notice: Callable[[str], None]) -> None:
        self._launcher = launcher
        self._pool = pool
        self._notice = notice

    def warm_up(self) -> None:
        """Begin to get ready: that needs no devices."""
        self._launcher.warm_up()

    def get_warm(self) -> str:
        """Wait until ready."""
        return self._launcher.get_warm()

    def run(self, request: Request) -> Ending:
        """Start the ranks when there are devices for all of them. Raises LeaseTimeout if there are none in time."""
        said = request.payload
        who = str(said.get("nodeid") or f"{said.get('driver')} {said.get('cell')} {request.directory}")
        # Imports take seconds and no device: others run meanwhile. What goes wrong with them, ``run`` says.
        self._launcher.get_warm()
        with self._pool().lease(request.world_size, who=who) as lease:
            ending = self._launcher.run(dataclasses.replace(request, set={**request.set, **lease.environment}))
        for leak in lease.leak:
            self._notice(f"{leak.who}: {leak.bytes >> 20} MiB stayed in use on {leak.id} after its ranks were gone")
        return ending

    def close(self) -> None:
        """End what is still running."""
        self._launcher.close()
