"""A node that has joined, as pytest's process sees it."""

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
    """A node that has joined, as pytest's process sees it."""

    def __init__(self, channel: Channel, hello: Mapping[str, Any]) -> None:
        self.channel = channel
        self.name = str(hello["name"])
        self.boot = str(hello["boot"])
        #: Why it is gone, and when that was noticed; empty while it is there.
        self.lost = ""
        self.lost_at = 0.0
        self.messages: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.facts: dict[str, Any] = {}
        #: How often its agent has said that it runs, about once a second, and when it did last.
        self.beats = 0
        self.beat_at = clock.now()
        #: By how much its CLOCK_MONOTONIC is ahead of ours.
        self.ahead = 0.0

    def measure_clock(self) -> None:
        """Find out how far ahead its clock is, from the fastest of several answers."""
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
        """Receive until a message of that kind comes, and return it."""
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
        except (OSError, NotProvedError) as error:
            self._lose_by(error)

    def lose(self, why: str) -> None:
        """Note that it is gone, and why."""
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
        """Return the name of one of its devices in the timeline.

        On this machine it is that of runs on one node.
        """
        on_this_machine = self.boot == boot_id()
        return name if on_this_machine else f"{self.name} {name}"

    def problem(self) -> str:
        """Return the answer to a message that was sent between runs.

        It says what is wrong, perhaps that the node is gone.
        """
        while not self.lost or not self.messages.empty():
            with contextlib.suppress(queue.Empty):
                return str(self.messages.get(timeout=0.1)["problem"])
        return self.lost

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message, unless the node is gone."""
        try:
            self.channel.send(message)
        except OSError as error:
            self._lose_by(error)


def problems(
    nodes: Sequence[Node], message: Callable[[Node], Mapping[str, Any]]
) -> dict[Node, str]:
    """Send each node a message, then wait for their answers: what is wrong, empty if nothing is."""
    for node in nodes:
        node.send(message(node))
    return {node: node.problem() for node in nodes}
