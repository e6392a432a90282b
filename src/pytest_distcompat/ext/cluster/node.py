"""``Node``: one machine of a session, and the agent on it, as pytest's process sees them.

The *agent* (``agent``) is the process that starts ranks on that machine. When one connects,
``membership`` makes a ``Node`` of it. A thread of its own then receives all that the agent sends
(``listen``). What belongs to a run goes into ``messages``, which ``run`` reads; beats are counted;
and if the connection breaks, the node is *lost*, with the reason.

Messages are dicts with a key ``is`` from the agent, such as ``{"is": "log", ...}``, and a key
``do`` to it. All are listed in ``agent``.
"""

from __future__ import annotations

import contextlib
import math
import queue
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pytest_distcompat import clock
from pytest_distcompat.ext.cluster.channel import Channel, NotProvedError, unreached
from pytest_distcompat.lease.pool import boot_id


class Node:
    """A node that has joined, or is about to.

    Args:
        channel: The connection to its agent.
        hello: The agent's first message: ``name``, such as ``n1``, and ``boot``, an id that differs
            between machines and between starts of one machine.
    """

    def __init__(self, channel: Channel, hello: Mapping[str, Any]) -> None:
        self.channel = channel
        self.name = str(hello["name"])
        self.boot = str(hello["boot"])
        #: Why it is gone, and when that was noticed; empty while it is there.
        self.lost = ""
        self.lost_at = 0.0
        #: What its agent has sent and nobody has read yet.
        self.messages: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        #: Its versions, files and the like, see ``facts``; empty until it has joined.
        self.facts: dict[str, Any] = {}
        #: How often its agent has said that it runs, about once a second, and when it did last.
        self.beats = 0
        self.beat_at = clock.now()
        #: By how many seconds its monotonic clock is ahead of this machine's.
        self.ahead = 0.0

    def measure_clock(self) -> None:
        """Find out how far ahead its clock is, from the fastest of several answers.

        The clock is read half way between question and answer, so a fast answer says it best.
        """
        fastest = math.inf
        for _ in range(5):
            sent_at = clock.now()
            self.channel.send({"do": "time"})
            answer = self.receive("time")
            round_trip = clock.now() - sent_at
            if round_trip < fastest:
                fastest = round_trip
                self.ahead = answer["now"] - sent_at - round_trip / 2

    def receive(self, kind: str) -> dict[str, Any]:
        """Receive until a message of that kind comes, and return it; drop others, such as beats.

        It is used before ``listen``, while the node joins.
        """
        while True:
            message = self.channel.receive()
            if message["is"] == kind:
                return message

    def listen(self) -> None:
        """Receive until the node is gone."""
        try:
            while True:
                message = self.channel.receive()
                if message["is"] == "beat":
                    self.beats += 1
                    self.beat_at = clock.now()
                elif message["is"] == "leaving":
                    self.lose(message["why"])
                    return
                else:
                    self.messages.put(message)
        # ``NotProvedError``: a message that the agent did not sign with the session's token.
        except (OSError, NotProvedError) as error:
            self._lose_by(error)

    def lose(self, why: str) -> None:
        """Note that it is gone, and why; of several reasons the first one stays."""
        if not self.lost:
            self.lost = why
            self.lost_at = clock.now()
        self.channel.close()

    def _lose_by(self, error: Exception) -> None:
        """Note that it is gone, as an error of the channel shows."""
        if unreached(error):
            self.lose("sent nothing for some seconds: the link is cut, or the node is down")
        else:
            self.lose(f"its agent is gone ({error})")

    def device(self, name: str) -> str:
        """Return the name of one of its devices in the report's timeline: ``n2 GPU-8a2f``.

        A node may be this very machine. Then it is the name that runs without nodes use.
        """
        on_this_machine = self.boot == boot_id()
        if on_this_machine:
            return name
        return f"{self.name} {name}"

    def problem(self) -> str:
        """Wait for the answer to a message that was sent between runs, and return its problem.

        The answer has a key ``problem``: what went wrong, empty for nothing. If the node is gone
        and has not answered, that is the problem.
        """
        while not self.lost or not self.messages.empty():
            with contextlib.suppress(queue.Empty):
                return str(self.messages.get(timeout=0.1)["problem"])
        return self.lost

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message; if that fails, the node is lost."""
        try:
            self.channel.send(message)
        except OSError as error:
            self._lose_by(error)


def problems(
    nodes: Sequence[Node], message: Callable[[Node], Mapping[str, Any]]
) -> dict[Node, str]:
    """Send each node a message, then wait for their answers; return the problem of each node.

    All are sent first, so that the nodes work at the same time.

    Args:
        nodes: The nodes.
        message: Returns the message for a node, such as ``{"do": "get_warm"}``.
    """
    for node in nodes:
        node.send(message(node))
    return {node: node.problem() for node in nodes}
