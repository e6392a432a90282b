"""Executors, which start the node agents of a session."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

#: By the name of the node its GPUs, as CUDA_VISIBLE_DEVICES has them there.
Given = Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class Asked:
    """Devices for one run.

    Attributes:
        nodes: The names of its nodes; empty for the node of pytest's process.
        resource: ``GPU`` or ``CPU``.
        least: A node with fewer devices is refused.
        most: The number of devices on each node; a node with fewer gives all.
        who: Names the request in messages.
    """

    nodes: Sequence[str]
    resource: str
    least: int
    most: int
    who: str


class Executor:
    """A way to start node agents: the command ``join``, which gets the token on its standard input, on each node."""

    name: ClassVar[str] = ""
    #: Where pytest listens by default: host and port, 0 for any.
    listen: ClassVar[tuple[str, int]] = ("127.0.0.1", 0)
    #: Whether ``names`` takes no time, so that too few nodes are an error before agents start.
    lists_at_once: ClassVar[bool] = True
    #: How users start agents that this executor does not start itself; empty if it starts all of them.
    hint: ClassVar[str] = ""
    #: Whether a scheduler counts the devices of its nodes, so that each run asks ``devices`` for them.
    accounts: ClassVar[bool] = False

    def unsupported_reason(self) -> str | None:
        """Return why it cannot start agents here; None if it can."""
        return None

    def names(self, nodes: int) -> list[str] | None:  # noqa: ARG002 - the executors' protocol
        """Return the names of so many nodes, fewer if there are fewer; None if it cannot start the agent of one alone."""
        return None

    def start(self, join: Sequence[str], nodes: int, token: str) -> list[subprocess.Popen[str]]:
        """Start the agents of so many nodes."""
        raise NotImplementedError

    def start_one(self, join: Sequence[str], name: str, token: str) -> subprocess.Popen[str] | None:
        """Start the agent of one node for one worker of xdist."""
        return self.restart(join, name, token)

    def restart(self, join: Sequence[str], name: str, token: str) -> subprocess.Popen[str] | None:  # noqa: ARG002
        """Start the agent of the node with that name, perhaps again; None if a user has to."""
        return None

    @contextlib.contextmanager
    def devices(self, asked: Asked, say: Callable[[str], None]) -> Iterator[Given]:  # noqa: ARG002
        """Hold devices inside the block; by default nobody counts them, and none are given.

        Args:
            asked: The devices.
            say: Shows the user what the request waits for, if anything. Called each second; what it raises ends the request.

        Raises:
            UsageProblem: There will be no such devices; the message says why.
        """
        yield {}

    def taken(self) -> str:
        """Return why a scheduler takes the session's nodes away, as far as it says; empty if they stay."""
        return ""

    @staticmethod
    def _popen(
        command: Sequence[str], token: str, *, answers: bool = False
    ) -> subprocess.Popen[str]:
        """Start one command that reads the token from its standard input, where no other process can see it.

        With ``answers`` it can be sent lines after that, and its answers be read.
        """
        # Named, or the process would also get LINES and COLUMNS, which readline sets past ``os.environ``.
        environment = dict(os.environ)
        output = subprocess.PIPE if answers else None
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=output,
            text=True,
            start_new_session=True,
            env=environment,
        )
        assert process.stdin is not None
        process.stdin.write(f"{token}\n")
        if answers:
            process.stdin.flush()
        else:
            process.stdin.close()
        return process
