"""The placement of a session's runs: on which machines its ranks are.

A *run* is one process group; its *ranks* may be spread over several *nodes* (machines). The core of
the plugin asks its ``Placement`` how the ranks of each test are spread, and in the end for the
launcher that starts them. ``plugin`` gives it a ``ClusterPlacement``, which answers by the options
``--distcompat-nodes`` and ``--distcompat-worker-nodes``, and by the ``nodes`` of marks and
matrices.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import pytest

from pytest_distcompat.cell import Matrix
from pytest_distcompat.plugin.placement import Placement
from pytest_distcompat.plugin.session import DistcompatSession
from pytest_distcompat.spread import Spread

if TYPE_CHECKING:
    from pytest_distcompat.ext.cluster.launcher import NodesLauncher
    from pytest_distcompat.launch.launcher import Launcher
    from pytest_distcompat.launch.request import Warmth
    from pytest_distcompat.lease import Inventory, Pool


class ClusterPlacement(Placement):
    """The placement of a session over several nodes, or on other nodes than this one.

    Args:
        session: The state of this plugin in the pytest session.

    Attributes:
        worker_nodes: Over how many nodes the runs of xdist workers are dealt out; 0 if all are on
            this node.
        shares: Whether a test needs a directory that all its nodes share.
    """

    def __init__(self, session: DistcompatSession) -> None:
        super().__init__()
        self._session = session
        setting = session.setting("nodes")
        # ``machines`` of the base is the most nodes that any noted test needs.
        #: Over how many nodes tests are spread that do not say.
        self._default = int(setting.value)
        self.worker_nodes = int(session.setting("worker_nodes").value)
        # The core deals out xdist's workers by it, and knows no nodes: 1 is this machine.
        self.machines_of_workers = max(1, self.worker_nodes)
        self.shares = False
        # The core appends it to the reason why a test's ranks cannot be spread.
        self.hint = f" (--distcompat-nodes, {setting.origin}); nodes=1 in its mark runs them on one"

    @property
    def elsewhere(self) -> bool:
        """Tell whether runs of this session span several nodes, or are on other nodes than this."""
        return self.machines > 1 or self.worker_nodes > 0 or self._default > 1

    def spread(self, world_size: int, nodes: int | None) -> Spread:
        """Return the spread of a test: over the nodes of its mark, or else of the session."""
        return Spread(world_size, nodes or self._default)

    def spread_matrix(self, matrix: Matrix) -> Matrix:
        """Return a matrix whose cells are spread over the nodes of the session.

        A matrix that names a number of nodes itself stays as it is.
        """
        return matrix.spread_as(Matrix(nodes=self._default))

    def note(self, spread: Spread, *, shares: bool) -> None:
        """Note a test of this session, when it is collected.

        Args:
            spread: Its number of ranks and of nodes.
            shares: Whether its nodes need a directory that all of them see.
        """
        super().note(spread, shares=shares)
        is_elsewhere = not spread.on_one or self.worker_nodes > 0
        # ``uneven``: the nodes do not divide its ranks. Such a test is skipped, so it needs
        # nothing.
        if shares and is_elsewhere and not spread.uneven:
            self.shares = True

    def launcher(self, local: Launcher, warmth: Warmth) -> Launcher:
        """Return the launcher of all runs of this session.

        It is ``local``, for runs on this machine, unless a test needs several nodes.
        """
        if self.machines == 1 and not self.worker_nodes:
            return local
        from pytest_distcompat.ext.cluster.session_nodes import Wanted, nodes_launcher

        wanted = Wanted(self.machines, self.worker_nodes, self.shares)
        launcher = nodes_launcher(self._session, wanted, local, warmth)
        plugins = self._session.config.pluginmanager
        plugins.register(NodesOfSession(launcher), "distcompat-nodes")
        return launcher


class NodesOfSession:
    """pytest plugin of a session over nodes: registered only in such a session.

    pytest and the core of the plugin call these hooks by their names.
    """

    def __init__(self, launcher: NodesLauncher) -> None:
        self._launcher = launcher

    def pytest_distcompat_why_not_ready(self) -> str:
        """Wait until all nodes have joined; return what is wrong with them, empty if nothing is."""
        return self._launcher.ready()

    def pytest_distcompat_pool(
        self, session: DistcompatSession, inventory: Inventory
    ) -> Pool | None:
        """Return the pool that lends GPUs to runs on this node, if a scheduler counts GPUs.

        Such a pool asks the scheduler first. None leaves it to the usual pool.
        """
        launcher = self._launcher
        # ``accounts``: the executor's scheduler hands out devices, as Ray does.
        if not launcher.accounts or not session.gpus:
            return None
        from pytest_distcompat.ext.cluster.pool import ScheduledPool

        return ScheduledPool(
            None,
            inventory,
            # No further nodes: the runs of this pool are on this one.
            ask=lambda ranks, who: launcher.devices([], ranks, who),
            **session.pool_options,
        )

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """End the session once a scheduler takes its nodes away: no later test can run."""
        report = yield
        # Why the scheduler takes the nodes away, such as the end of a job; empty otherwise.
        if self._launcher.taken:
            item.session.shouldstop = self._launcher.taken
        return report
