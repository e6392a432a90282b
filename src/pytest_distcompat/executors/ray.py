"""Executor ``ray``: a Ray cluster that is there starts one node agent on each node.

Run as a module, this file is the process that holds the cluster's resources: pytest's own process does not import ray.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from pytest_distcompat.executors._base import Executor
from pytest_distcompat.failures import UsageProblem

#: How long the cluster may take to give the nodes, in seconds.
PLACEMENT_S = 30
#: How long the address of the cluster may take to answer, in seconds.
REACHED_S = 10
_PREFIX = "--distcompat-executor ray: "


class Ray(Executor):
    """Node agents on nodes of the cluster that ``RAY_ADDRESS`` names, or that runs on this machine."""

    name = "ray"
    listen = (socket.gethostname(), 0)
    # pytest's own process does not import ray, and another one takes seconds.
    lists_at_once = False

    def unsupported_reason(self) -> str | None:
        """Return why there is no Ray to use; None if there is."""
        return None if importlib.util.find_spec("ray") else "ray is not installed: pip install 'pytest-distcompat[ray]'"

    def names(self, nodes: int) -> list[str]:
        """Return the first nodes of the cluster.

        Raises UsageProblem if no cluster is there, or workers of xdist would share the GPUs of a node.
        """
        listed = subprocess.run([sys.executable, "-m", __name__, "names"], check=False, capture_output=True, text=True)
        if listed.returncode:
            raise UsageProblem(listed.stderr.strip().rpartition(_PREFIX)[2])
        found = [line.split() for line in listed.stdout.splitlines()][:nodes]
        if int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > nodes and any(int(gpus) for _, gpus in found):
            raise UsageProblem(
                f"Ray shows a worker's agent the GPUs that it asked for alone; expected -n {nodes} at most"
            )
        return [name for name, _ in found]

    def start(self, join: Sequence[str], nodes: int, token: str) -> list[subprocess.Popen[str]]:
        """Start the process that asks Ray for the nodes."""
        return [self._popen([sys.executable, "-m", __name__, "start", str(nodes), *join], token)]

    def start_one(self, join: Sequence[str], name: str, token: str) -> subprocess.Popen[str]:
        """Start the process that asks Ray for one node."""
        return self._popen([sys.executable, "-m", __name__, "start_one", name, *join], token)


def nodes_by_name() -> dict[str, Any]:
    """Connect to the cluster and return its nodes, by names in the same order in all processes. Raises ConnectionError."""
    host, colon, port = os.environ.get("RAY_ADDRESS", "").rpartition(":")
    if colon and port.isdecimal() and "/" not in host:
        # Ray itself tries for twelve minutes.
        try:
            socket.create_connection((host.strip("[]"), int(port)), REACHED_S).close()
        except OSError as error:
            raise ConnectionError(f"{host}:{port}: {error}") from None
    import ray

    ray.init(address="auto", logging_level="warning", namespace="distcompat")
    alive = sorted((node for node in ray.nodes() if node["Alive"]), key=lambda node: str(node["NodeID"]))
    hosts = [node["NodeManagerHostname"] for node in alive]
    # Several nodes of a cluster can be on one machine.
    names = [host if hosts.count(host) == 1 else f"{host}-{number}" for number, host in enumerate(hosts)]
    return dict(zip(names, alive, strict=True))


def gpus_of(node: Mapping[str, Any]) -> int:
    """Return how many GPUs of a node to ask for: all, since Ray hides those that a task did not ask for."""
    return int(node["Resources"].get("GPU", 0))


def start_one(name: str, join: Sequence[str], token: str) -> str:
    """Run the agent of one worker of xdist on that node until the session ends; return what is wrong."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    nodes = nodes_by_name()
    if name not in nodes:
        return f"the node {name} is gone; there are {', '.join(nodes)}"
    gpus = gpus_of(nodes[name])
    where = NodeAffinitySchedulingStrategy(nodes[name]["NodeID"], soft=False)
    agent: Any = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=0, scheduling_strategy=where)(_agent)
    with contextlib.suppress(ray.exceptions.RayError):
        ray.get(agent.remote([*join, "--name", name], token))
    return ""


def start(nodes: int, join: Sequence[str], token: str) -> str:
    """Run an agent on each of so many nodes until the session ends; return what is wrong, empty if nothing is."""
    import ray
    from ray.util.placement_group import placement_group, placement_group_table
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    found = nodes_by_name()
    names = {node["NodeID"]: name for name, node in found.items()}
    if len(found) < nodes:
        return f"the cluster has {len(found)} of {nodes} nodes"
    gpus = min(map(gpus_of, found.values()))
    group = placement_group([{"CPU": 1, "GPU": gpus} if gpus else {"CPU": 1}] * nodes, strategy="STRICT_SPREAD")
    if not group.wait(PLACEMENT_S):
        free = ", ".join(
            f"{name} {number:g}" for name, number in ray.available_resources().items() if name in ("CPU", "GPU")
        )
        return f"Ray gave no {nodes} nodes with one CPU and {gpus} GPUs each in {PLACEMENT_S} s; free: {free or 'none'}"
    places = placement_group_table(group)["bundles_to_node_id"]
    agents = []
    for bundle in range(nodes):
        where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
        agent: Any = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=0, scheduling_strategy=where)(_agent)
        agents.append(agent.remote([*join, "--name", names[places[bundle]]], token))
    for agent in agents:
        # Where a node of the cluster is gone, the agents of the others go on; they end with this process.
        with contextlib.suppress(ray.exceptions.RayError):
            ray.get(agent)
    return ""


def _agent(command: Sequence[str], token: str) -> int:
    """Run a node agent, in a process of Ray on its node."""
    return subprocess.run(command, input=f"{token}\n", text=True, check=False).returncode


def main(action: str, *arguments: str) -> str:
    """Do one of ``names``, ``start`` and ``start_one``; return what is wrong, empty if nothing is."""
    try:
        if action == "names":
            sys.stdout.writelines(f"{name} {gpus_of(node)}\n" for name, node in nodes_by_name().items())
            return ""
        token = sys.stdin.readline().strip()
        if action == "start_one":
            return start_one(arguments[0], arguments[1:], token)
        return start(int(arguments[0]), arguments[1:], token)
    except ConnectionError as error:
        return f"no Ray cluster is there ({error}); start one by `ray start`, or set RAY_ADDRESS"


if __name__ == "__main__":
    problem = main(*sys.argv[1:])
    if problem:
        sys.exit(f"{_PREFIX}{problem}")
