"""The launcher of runs that span nodes: pytest's side of the node agents.

Runs on one node go to another launcher.

On each node an agent runs (``agent``), which joins pytest's process by a channel, is told what to
run, and starts the ranks there. ``Node`` is an agent as pytest sees it. ``Membership`` has the
agents of a session started, and waits until all have joined. ``NodesLauncher`` gives them the runs,
each of which is a ``NodesRun``.

A scheduler, such as Slurm or Ray, may count the devices of the nodes: then each run asks it for
them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from pytest_distcompat import clock
from pytest_distcompat.ext.cluster.executors import Asked, Executor, Given
from pytest_distcompat.ext.cluster.membership import Membership
from pytest_distcompat.ext.cluster.node import Node, problems
from pytest_distcompat.ext.cluster.run import NodesRun
from pytest_distcompat.ext.cluster.settings import Settings
from pytest_distcompat.failures import UsageProblem
from pytest_distcompat.launch.forensics.ending import Ending
from pytest_distcompat.launch.launcher import Launcher, OpenRun
from pytest_distcompat.launch.request import Request, Warmth
from pytest_distcompat.lease.timeline import Span, append
from pytest_distcompat.leased import current_item


class NodesLauncher(Launcher):
    """Launcher that runs requests of several nodes on node agents.

    Requests of one node go to the launcher ``on_one_node``.
    """

    def __init__(
        self,
        on_one_node: Launcher,
        executor: Executor,
        settings: Settings,
        warmth: Warmth,
        session: str,
    ) -> None:
        self._on_one_node = on_one_node
        self._executor = executor
        self._settings = settings
        self._membership = Membership(executor, settings, warmth, session)
        self._environment = dict(os.environ)
        #: Whether the executor's scheduler counts devices.
        self.accounts = executor.accounts

    @property
    def taken(self) -> str:
        """Why a scheduler takes all nodes away, so that no later run can start.

        Empty while it does not.
        """
        return self._membership.taken

    def warm_up(self) -> None:
        """Start the agents that the executor starts.

        Warm up what runs on one node too, unless an agent has that.
        """
        if not self._settings.node:
            self._on_one_node.warm_up()
        self._membership.start()

    def ready(self) -> str:
        """Wait until all nodes have joined and are alike.

        Returns:
            What is wrong; empty if nothing is.
        """
        return self._membership.ready()

    def get_warm(self) -> str:
        """Wait until what runs on one node is ready; return what is wrong with it."""
        return self._on_one_node.get_warm()

    def run(self, request: Request) -> Ending:
        """Run the request on its nodes."""
        needs_agent = bool(self._settings.node) or bool(request.payload.get("own_disks"))
        if request.nodes == 1 and not needs_agent:
            return self._on_one_node.run(request)
        problem = self.ready()
        if problem:
            return Ending.not_launched(request.world_size, problem)
        nodes = self._membership.present(request.nodes)
        # Imports take seconds on each node, and the time limit begins with the ranks.
        not_warm = []
        for node, cold_reason in problems(nodes, lambda _: {"do": "get_warm"}).items():
            if cold_reason:
                not_warm.append(f"{node.name}: {cold_reason}")
        if not_warm:
            return Ending.not_launched(request.world_size, "\n".join(not_warm))
        try:
            return self._run_on(nodes, request)
        except UsageProblem as error:
            return Ending.not_launched(request.world_size, str(error))

    def _run_on(self, nodes: list[Node], request: Request) -> Ending:
        """Run the request on these nodes once it has its devices.

        Record the lease of devices that a scheduler gave.
        """
        who = current_item() or request.directory
        requested_at = clock.now()
        with self.devices(nodes, request.spread.local_size, who) as given:
            granted_at = clock.now()
            run = NodesRun(
                nodes,
                request.from_here(),
                self._environment,
                self._settings,
                self._membership.find_taken,
                given,
            )
            ending = run.run()
            if run.devices:
                # One node that leases devices has noted them itself.
                span = Span(
                    run.devices,
                    who,
                    os.getpid(),
                    requested_at,
                    granted_at,
                    clock.now(),
                    worker=self._settings.worker,
                )
                # The record is for reports only.
                with contextlib.suppress(OSError):
                    append(Path(self._settings.timeline), span)
            return ending

    def devices(
        self, nodes: Sequence[Node], ranks: int, who: str
    ) -> contextlib.AbstractContextManager[Given]:
        """Hold devices for so many ranks on each of these nodes, or on pytest's own.

        Nothing is held unless the executor's scheduler counts devices.
        """
        self._membership.start()
        settings = self._settings
        names = [node.name for node in nodes] or [""]
        if settings.device == "cpu":
            # Ranks can share cores.
            asked = Asked(names, "CPU", 0, ranks, who)
        else:
            # Rounded up.
            least = -(-ranks // settings.ranks_each)
            asked = Asked(names, "GPU", least, min(ranks, settings.gpus), who)

        def say(text: str) -> None:
            lost = []
            for node in nodes:
                if node.lost:
                    lost.append(f"{node.name}: {node.lost}")
            if lost:
                raise UsageProblem("; ".join(lost))
            if text:
                settings.say(text)

        return self._executor.devices(asked, say)

    @property
    def can_open(self) -> bool:
        """Tell whether runs of one node, if they are on this one, can be held open."""
        return not self._settings.node and self._on_one_node.can_open

    def open(self, request: Request, target: str) -> OpenRun:
        """Start ranks on this node that get requests."""
        return self._on_one_node.open(request, target)

    def close(self) -> None:
        """End all node agents that were started, and let the others go."""
        self._membership.close()
        self._on_one_node.close()
