"""Base class of executors: ways to start an agent of the session on each of several machines.

An *agent* is the process that starts the ranks of a test on its machine, the *node* (``agent``).
``--distcompat-executor NAME`` chooses an executor: ``local``, ``join``, ``slurm`` and ``ray`` are
modules of this package, and another package can add one by an entry point. ``session_nodes`` makes
it and asks whether it can be used; ``membership`` has it start agents; ``launcher`` asks it for
devices, if it has a scheduler that counts them.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

#: Name of a node -> the GPUs that a run was given there, as in CUDA_VISIBLE_DEVICES:
#: ``{"n1": ["0", "1"]}``. Empty if no device was requested of a scheduler, or for CPUs.
Given = Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class Asked:
    """A request for the devices of one run.

    Attributes:
        nodes: The names of the nodes; empty for the node of pytest's process.
        resource: ``GPU`` or ``CPU``.
        least: The least number of devices on each node; a node with fewer is refused.
        most: The most devices to take on each node; a node with fewer gives all.
        who: A name for the request in messages.
    """

    nodes: Sequence[str]
    resource: str
    least: int
    most: int
    who: str


class Executor:
    """A way to start agents on nodes, such as ssh or Slurm.

    An agent is the command ``join``, which the methods get as ``join``: ``["python", "-m",
    "pytest_distcompat.cli", "join", "10.0.0.1:29500", ...]``. With ``--name NAME`` it has that name
    in verdicts. It reads a token, the secret that pytest's process expects of it, from its standard
    input.
    """

    #: The name in ``--distcompat-executor``.
    name: ClassVar[str] = ""
    #: Where pytest listens by default: host and port, 0 for any.
    listen: ClassVar[tuple[str, int]] = ("127.0.0.1", 0)
    #: Whether ``names`` answers at once, so that too few nodes can be reported before agents start.
    lists_at_once: ClassVar[bool] = True
    #: How users start the agents, if the executor does not start them itself; else empty.
    hint: ClassVar[str] = ""
    #: Whether a scheduler hands out the devices of its nodes, so that each run requests them by
    #: ``devices``.
    accounts: ClassVar[bool] = False

    def unsupported_reason(self) -> str | None:
        """Return why the executor cannot start agents here; None if it can."""
        return None

    def names(self, nodes: int) -> list[str] | None:  # noqa: ARG002 - the executors' protocol
        """Return the names of so many nodes, or of all if there are fewer.

        None means that the executor cannot start the agent of a node by its name (``start_one``).
        """
        return None

    def start(self, join: Sequence[str], nodes: int, token: str) -> list[subprocess.Popen[str]]:
        """Start the agents of so many nodes, and return the processes that were started.

        They may be the agents, or what runs them, such as ``srun``. All must end with the agents.
        """
        raise NotImplementedError

    def start_one(self, join: Sequence[str], name: str, token: str) -> subprocess.Popen[str] | None:
        """Start the agent of the node of that name, which has all runs of one xdist worker.

        By default it starts as a lost agent does (``restart``).
        """
        return self.restart(join, name, token)

    def restart(self, join: Sequence[str], name: str, token: str) -> subprocess.Popen[str] | None:  # noqa: ARG002
        """Start the agent of a lost node again; return None if the user must do that."""
        return None

    @contextlib.contextmanager
    def devices(self, asked: Asked, say: Callable[[str], None]) -> Iterator[Given]:  # noqa: ARG002
        """Hold the devices of one run inside a ``with`` block; without a scheduler none are given.

        Args:
            asked: The request.
            say: Called each second with what the request waits for, empty if there is nothing new
                to say. If it raises an exception, the request is given up.

        Yields:
            The GPUs, by node.

        Raises:
            UsageProblem: If there never will be such devices; the message says why.
        """
        yield {}

    def taken(self) -> str:
        """Return why a scheduler takes the session's nodes away; empty if it does not."""
        return ""

    @staticmethod
    def _popen(
        command: Sequence[str], token: str, *, answers: bool = False
    ) -> subprocess.Popen[str]:
        """Start a command and write the token to its standard input, unseen by other processes.

        Args:
            command: The command.
            token: The token.
            answers: Whether to keep its standard input open and to read its output by a pipe.
        """
        # With ``env=None`` the process would also get LINES and COLUMNS, which readline sets past
        # ``os.environ``.
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
