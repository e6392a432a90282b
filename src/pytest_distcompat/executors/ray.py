"""Executor ``ray``: a Ray cluster that is there starts one node agent on each node.

Run as a module, this file is the process that holds the cluster's resources: pytest's own process does not import ray.
"""

from __future__ import annotations

import contextlib
import importlib.util
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

from pytest_distcompat.executors._base import Executor

#: How long the cluster may take to give the nodes, in seconds.
PLACEMENT_S = 30


class Ray(Executor):
    """Node agents on nodes of the cluster that ``RAY_ADDRESS`` names, or that runs on this machine."""

    name = "ray"
    listen = (socket.gethostname(), 0)

    def unsupported_reason(self) -> str | None:
        """Return why there is no Ray to use; None if there is."""
        return None if importlib.util.find_spec("ray") else "ray is not installed: pip install 'pytest-distcompat[ray]'"

    def start(self, join: Sequence[str], nodes: int, token: str) -> list[subprocess.Popen[str]]:
        """Start the process that asks Ray for the nodes."""
        return [self._popen([sys.executable, "-m", __name__, str(nodes), *join], token)]


def main(nodes: int, join: Sequence[str], token: str) -> str:
    """Run an agent on each of so many nodes until the session ends; return what is wrong, empty if nothing is."""
    import ray
    from ray.util.placement_group import placement_group, placement_group_table
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    try:
        ray.init(address="auto", logging_level="warning", namespace="distcompat")
    except ConnectionError as error:
        return f"no Ray cluster is there ({error}); start one by `ray start`, or set RAY_ADDRESS"
    alive = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
    if len(alive) < nodes:
        return f"the cluster has {len(alive)} of {nodes} nodes"
    # Ray hides the GPUs that a task did not ask for.
    gpus = int(min(node["Resources"].get("GPU", 0) for node in alive.values()))
    group = placement_group([{"CPU": 1, "GPU": gpus} if gpus else {"CPU": 1}] * nodes, strategy="STRICT_SPREAD")
    if not group.wait(PLACEMENT_S):
        free = ", ".join(
            f"{name} {number:g}" for name, number in ray.available_resources().items() if name in ("CPU", "GPU")
        )
        return f"Ray gave no {nodes} nodes with one CPU and {gpus} GPUs each in {PLACEMENT_S} s; free: {free or 'none'}"
    places = placement_group_table(group)["bundles_to_node_id"]
    hosts = [alive[places[bundle]]["NodeManagerHostname"] for bundle in range(nodes)]
    agents = []
    for bundle, host in enumerate(hosts):
        # Several nodes of a cluster can be on one machine.
        name = host if Counter(hosts)[host] == 1 else f"{host}-{bundle}"
        where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
        agent: Any = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=0, scheduling_strategy=where)(_agent)
        agents.append(agent.remote([*join, "--name", name], token))
    for agent in agents:
        # Where a node of the cluster is gone, the agents of the others go on; they end with this process.
        with contextlib.suppress(ray.exceptions.RayError):
            ray.get(agent)
    return ""


def _agent(command: Sequence[str], token: str) -> int:
    """Run a node agent, in a process of Ray on its node."""
    return subprocess.run(command, input=f"{token}\n", text=True, check=False).returncode


if __name__ == "__main__":
    problem = main(int(sys.argv[1]), sys.argv[2:], sys.stdin.readline().strip())
    if problem:
        sys.exit(f"--distcompat-executor ray: {problem}")
