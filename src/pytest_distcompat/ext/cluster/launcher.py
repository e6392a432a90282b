"""``NodesLauncher``: starts the runs of a session, those over several nodes by their agents.

A *launcher* runs a ``Request`` (what to call on how many ranks) and returns an ``Ending`` (how all
ranks ended). pytest's process has one launcher for the whole session. In a session over nodes
(machines) ``session_nodes`` makes this one around the usual launcher, to which runs on one node go
as ever.

On each node an *agent* runs (``agent``): it joins pytest's process by a channel, and starts the
ranks there. ``Node`` is an agent as pytest sees it. ``Membership`` has the agents of a session
started, and waits until all have joined. Each run over nodes is a ``NodesRun`` (``run``).

A scheduler, such as Ray, may count the devices of the nodes: then each run asks it for them
(``devices``). A *lease* is the span of time in which a run has devices.
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

    Args:
        on_one_node: The launcher to which requests of one node go.
        executor: How agents are started: on this machine, by Slurm, on Ray, by hand.
        settings: How many nodes there are, where they join, and so on.
        warmth: What the launcher process on each node imports in advance.
        session: A description of the session for the ranks, as JSON.
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
        #: The environment when the session began. Nodes are sent what tests have changed since.
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
        """Start the agents that the executor starts, without waiting for them.

        Warm up the launcher of runs on one node too, unless an agent has those runs.
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
        """Wait until the launcher of runs on one node is ready.

        Returns:
            What is wrong; empty if nothing is.
        """
        return self._on_one_node.get_warm()

    def run(self, request: Request) -> Ending:
        """Run the request on its nodes, or on this one if it needs only one.

        A run that cannot start returns an ``Ending`` with the reason.
        """
        # ``settings.node``: an agent has all runs of this process. ``own_disks``: each node saves
        # on a disk of its own, so a run on one node that loads a checkpoint needs an agent too.
        needs_agent = bool(self._settings.node) or bool(request.payload.get("own_disks"))
        if request.nodes == 1 and not needs_agent:
            return self._on_one_node.run(request)
        problem = self.ready()
        if problem:
            return Ending.not_launched(request.world_size, problem)
        nodes = self._membership.present(request.nodes)
        # Wait until all nodes have imported torch and the like, which takes seconds: the time limit
        # of the run begins with its ranks.
        not_warm = []
        # ``problems`` asks all nodes at once: node -> why it is not ready, empty if it is.
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

        The lease of devices that a scheduler gave, from when to when the run had them, is recorded
        for the report's timeline.
        """
        who = current_item() or request.directory
        requested_at = clock.now()
        # ``given``: by the name of a node, the devices that a scheduler gives the run there; empty
        # without a scheduler that counts devices.
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
            # Empty if the run's only node leases devices itself: it has recorded the lease then.
            if run.devices:
                span = Span(
                    ids=run.devices,
                    who=who,
                    pid=os.getpid(),
                    asked=requested_at,
                    got=granted_at,
                    released=clock.now(),
                    worker=self._settings.worker,
                )
                # The record is for reports only.
                with contextlib.suppress(OSError):
                    append(Path(self._settings.timeline), span)
            return ending

    def devices(
        self, nodes: Sequence[Node], ranks: int, who: str
    ) -> contextlib.AbstractContextManager[Given]:
        """Return a context in which the run has devices for its ranks.

        Without a scheduler that counts devices the context gives none, and waits for nothing.

        Args:
            nodes: The nodes of the run; none for pytest's own node.
            ranks: The number of ranks on each node.
            who: Who asks, for messages: the test.
        """
        self._membership.start()
        settings = self._settings
        # The name of pytest's own node is empty.
        names = [node.name for node in nodes] or [""]
        if settings.device == "cpu":
            # Ranks can share cores, so any number of cores will do, even none by Ray's count.
            asked = Asked(nodes=names, resource="CPU", least=0, most=ranks, who=who)
        else:
            # Several ranks may share a GPU: the number of GPUs, rounded up.
            least = -(-ranks // settings.ranks_each)
            most = min(ranks, settings.gpus)
            asked = Asked(nodes=names, resource="GPU", least=least, most=most, who=who)

        def say(text: str) -> None:
            """Show the user what the run waits for; give up if a node is lost meanwhile."""
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
        """Tell whether ranks on this machine can get several requests, one after the other."""
        return not self._settings.node and self._on_one_node.can_open

    def open(self, request: Request, target: str) -> OpenRun:
        """Start ranks on this machine that get several requests, as ``reuse`` in marks needs."""
        return self._on_one_node.open(request, target)

    def close(self) -> None:
        """End all node agents that were started, and let the others go."""
        self._membership.close()
        self._on_one_node.close()
