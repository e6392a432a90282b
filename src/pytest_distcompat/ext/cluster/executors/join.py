"""Executor ``join``: a user, or a scheduler, starts ``distcompat join`` on each further node.

An *executor* starts the agents of a session over several machines (``_base``). This one starts only
the agent of pytest's own machine.
"""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Sequence

from pytest_distcompat.ext.cluster.executors._base import Executor


class Join(Executor):
    """Executor that starts one agent, on this machine; the others join by themselves."""

    name = "join"
    hint = "run `distcompat join HOST:PORT --token-file FILE` on each further node"

    def start(self, join: Sequence[str], nodes: int, token: str) -> list[subprocess.Popen[str]]:  # noqa: ARG002
        """Start the agent of this node."""
        return [self._popen([*join, "--name", socket.gethostname()], token)]

    def restart(self, join: Sequence[str], name: str, token: str) -> subprocess.Popen[str] | None:
        """Start the agent of this node again."""
        if name != socket.gethostname():
            return None
        return self._popen([*join, "--name", name], token)
