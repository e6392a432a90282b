"""The time limit of a run over several nodes (machines), which waits while a job is suspended.

A scheduler such as Slurm may stop all processes of a job for minutes, and let them go on later. By
the clock a run would then be over its time limit. So a ``TimeLimit`` counts *beats*: each node's
agent, the process that starts ranks there, sends one a second while it runs. ``Node.beats`` is how
many have arrived.

``NodesRun`` (``run``) makes a ``TimeLimit`` for each run. It calls ``begin`` when the ranks have
their devices, and then, many times a second, ``note_suspended`` and ``is_over``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pytest_distcompat import clock
from pytest_distcompat.ext.cluster.agent import HEARTBEAT_S
from pytest_distcompat.ext.cluster.node import Node

#: How long a node may take to end its ranks after the time limit, in seconds: its own watchdog ends
#: them at the limit, and knows more of them.
AFTER_LIMIT_S = 8.0
#: How long a job may be suspended while pytest runs on, in seconds. An agent that never runs again,
#: though its node answers, looks like that.
SUSPENDED_S = 3600.0


class TimeLimit:
    """The time limit of one run, in beats of the agents: a suspended job has none.

    Args:
        nodes: The nodes of the run.
        seconds: The limit.
        say: Shows the user a message.
    """

    def __init__(self, nodes: Sequence[Node], seconds: float, say: Callable[[str], None]) -> None:
        self._nodes = nodes
        self._seconds = seconds
        self._say = say
        #: How many beats each node had given when the limit began; empty before.
        self._counted_from: dict[Node, int] = {}
        #: The nodes that were suspended when ``note_suspended`` was called last, and when that was.
        self._suspended: list[Node] = []
        self._looked_at = clock.now()
        #: Since when some node has been suspended; counted anew after this process was stopped
        #: itself.
        self._suspended_since = self._looked_at

    def begin(self) -> None:
        """Begin to count beats, unless that has begun."""
        if not self._counted_from:
            self._counted_from = {node: node.beats for node in self._nodes}

    def is_over(self, running: Sequence[Node]) -> bool:
        """Tell whether the time limit has passed on all nodes that still run their parts.

        A node on which it has not was suspended for a while, and the others wait for its ranks.
        """
        if not self._counted_from:
            return False
        limit = (self._seconds + AFTER_LIMIT_S) / HEARTBEAT_S

        def has_run_for_so_long(node: Node) -> bool:
            return node.beats - self._counted_from[node] > limit

        return all(map(has_run_for_so_long, running))

    def note_suspended(self, running: Sequence[Node], now: float) -> None:
        """Tell the user of nodes whose agents do not run, and give up those that stay so too long.

        A node counts as suspended if its last beat is more than ``clock.GAP_S`` (5 s) old.

        Args:
            running: The nodes that have not ended their parts.
            now: The time, by ``clock.now``.
        """
        # If this process itself has not looked for so long, it was stopped, as a whole job is. Then
        # all nodes count as suspended too: beats that arrived meanwhile say nothing.
        suspended: list[Node] = []
        for node in running:
            # ``beat_at`` is when the last beat of the node arrived.
            if now - min(self._looked_at, node.beat_at) > clock.GAP_S:
                suspended.append(node)
        if suspended and not self._suspended:
            names = ", ".join(node.name for node in suspended)
            self._say(f"{names}: stopped, as in a suspended job, or very busy; time limits wait")
        # Count anew if no node was suspended when this was called last, or after this process was
        # stopped, in which time it could not see a beat.
        if not self._suspended or now - self._looked_at > clock.GAP_S:
            self._suspended_since = now
        self._suspended = suspended
        self._looked_at = now
        if now - self._suspended_since > SUSPENDED_S:
            for node in suspended:
                node.lose(
                    f"its agent has not run for {SUSPENDED_S / 60:g} minutes, "
                    "though the node answers"
                )
