"""Executor ``ray``: starts the agents of a session on a Ray cluster, and gets devices from Ray.

An *executor* is how the session's *agents* are started, one on each machine: processes that start
the ranks of a test there. pytest's process makes a ``Ray`` with ``--distcompat-executor ray``. Its
callers are ``session_nodes`` (``names``), ``membership`` (``start``, ``start_one``) and
``launcher`` (``devices``, for each run).

pytest's process does not import ray, which takes seconds. ``Ray`` starts the module
``_ray_cluster`` in another process, which connects to the cluster, and talks to it by lines of JSON
on its standard input and output.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pytest_distcompat.ext.cluster.executors._base import Asked, Executor, Given
from pytest_distcompat.ext.cluster.executors._ray_cluster import PREFIX
from pytest_distcompat.failures import UsageProblem

#: The module that talks to Ray, run in a process of its own.
_CLUSTER_MODULE = "pytest_distcompat.ext.cluster.executors._ray_cluster"


class Ray(Executor):
    """Executor for the Ray cluster that ``RAY_ADDRESS`` names, or that this machine belongs to."""

    name = "ray"
    listen = (socket.gethostname(), 0)
    # Another process must import ray to list the nodes, which takes seconds.
    lists_at_once = False
    accounts = True

    def __init__(self) -> None:
        #: The process that talks to Ray; None until agents are started.
        self._process: subprocess.Popen[str] | None = None
        #: The number of the last request for devices, which its answers repeat.
        self._number = 0

    def unsupported_reason(self) -> str | None:
        """Return why ray cannot be used here; None if it can."""
        if importlib.util.find_spec("ray"):
            return None
        return "ray is not installed: pip install 'pytest-distcompat[ray]'"

    def names(self, nodes: int) -> list[str]:
        """Return the names of the first nodes. Raises UsageProblem without a cluster."""
        listed = subprocess.run(
            [sys.executable, "-m", _CLUSTER_MODULE, "names"],
            check=False,
            capture_output=True,
            text=True,
        )
        if listed.returncode:
            # Ray may have written warnings before the reason.
            raise UsageProblem(listed.stderr.strip().rpartition(PREFIX)[2])
        return listed.stdout.split()[:nodes]

    def start(self, join: Sequence[str], nodes: int, token: str) -> list[subprocess.Popen[str]]:
        """Start the process that starts the agents of the first nodes."""
        self._process = self._popen(
            [sys.executable, "-m", _CLUSTER_MODULE, "start", str(nodes), *join], token, answers=True
        )
        return [self._process]

    def start_one(self, join: Sequence[str], name: str, token: str) -> subprocess.Popen[str]:
        """Start the process that starts the agent of one node."""
        self._process = self._popen(
            [sys.executable, "-m", _CLUSTER_MODULE, "start_one", name, *join], token, answers=True
        )
        return self._process

    @contextlib.contextmanager
    def devices(self, asked: Asked, say: Callable[[str], None]) -> Iterator[Given]:
        """Hold the devices of one run inside the block: Ray's placement group.

        Args:
            asked: Which devices, on which nodes.
            say: Called each second with what the request waits for; it may raise to give up.

        Yields:
            The GPUs by node, such as ``{"n1": ["0", "1"]}``.

        Raises:
            UsageProblem: The nodes never have so many devices, or they did not become free.
        """
        self._number += 1
        # No answer yet: requests are numbered from 1.
        answer: dict[str, Any] = {"number": 0}
        try:
            self._send({**dataclasses.asdict(asked), "number": self._number})
            # Answers of an earlier request, which was given up, may still come.
            while answer["number"] != self._number or "waits" in answer:
                if answer["number"] == self._number:
                    say(answer["waits"])
                assert self._process is not None
                assert self._process.stdout is not None
                answer = json.loads(self._process.stdout.readline())
        except (OSError, json.JSONDecodeError):
            raise UsageProblem("the process that asks Ray for devices has ended") from None
        except BaseException:
            # The run gave up to wait, so it has no ranks that use the devices.
            self._give_back()
            raise
        if "refused" in answer:
            raise UsageProblem(answer["refused"])
        yield answer["given"]
        # Only if no exception ended the block: after one, ranks may still use the devices. Then the
        # next request frees them, or the end of all agents.
        self._give_back()

    def _give_back(self) -> None:
        """Free the devices of the last run."""
        with contextlib.suppress(OSError):
            self._send({"nodes": []})

    def _send(self, request: Mapping[str, Any]) -> None:
        """Send a request, the fields of ``Asked`` and its number, to the process that asks Ray."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(f"{json.dumps(request)}\n")
        self._process.stdin.flush()
