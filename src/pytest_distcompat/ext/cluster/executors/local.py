"""Executor ``local``: all nodes are on this machine, for trying out.

An *agent* is the process that starts the ranks of a test on its machine, the *node*. An *executor*
starts the agents of a session over several machines (``_base``). This one starts all of them here,
so that ``pytest --distcompat-nodes 2`` works without a second machine.

``membership`` calls ``start`` for all agents at once, and ``restart`` for a single one, such as
one that is gone. Both get the agent's command line, ``["python", "-m", "pytest_distcompat.cli",
"join", "127.0.0.1:29500", ...]``, and a token, the secret that the agent reads from its standard
input.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from pytest_distcompat.ext.cluster.executors._base import Executor


class Local(Executor):
    """Executor that starts several agents on this machine, named n1, n2 and so on."""

    name = "local"

    def names(self, nodes: int) -> list[str]:
        """Return n1, n2 and so on."""
        return [f"n{number}" for number in range(1, nodes + 1)]

    def start(self, join: Sequence[str], nodes: int, token: str) -> list[subprocess.Popen[str]]:
        """Start the agents of that many nodes, and return their processes."""
        return [self.restart(join, name, token) for name in self.names(nodes)]

    def restart(self, join: Sequence[str], name: str, token: str) -> subprocess.Popen[str]:
        """Start the agent of the node ``name``, such as ``n2``, and return its process."""
        # ``_popen`` writes the token to the standard input of the process.
        return self._popen([*join, "--name", name], token)
