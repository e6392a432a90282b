"""The process that talks to a Ray cluster for the executor ``ray``; nothing imports ray before it.

The class ``Ray`` (module ``ray``) runs this module by ``python -m`` in a process beside pytest:

- It runs the session's agents as Ray tasks, one on each machine. An *agent* starts the ranks of a
  test on its machine. The tasks have no resources, so that the agents stay warm while others use
  the devices.
- For each line of JSON on its standard input it frees the devices of the last run of ranks, and
  requests those of the next one. The line has the fields of ``Asked`` and a number:
  ``{"nodes": ["n1"], "resource": "GPU", "least": 1, "most": 2, "who": "test_x", "number": 3}``.
- It answers by lines on its standard output: ``{"waits": TEXT, "number": 3}`` each second, then
  ``{"given": {"n1": ["0", "1"]}, "number": 3}``, or ``{"refused": WHY, "number": 3}``.

Devices are requested as a *placement group*: Ray's reservation of resources on several nodes at
once. A *bundle* is its part on one node.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pytest_distcompat import clock

#: Time limit for a connection to the cluster, in seconds.
REACHED_S = 10
#: Time limit for the task that names the GPUs of a bundle, in seconds. Ray may start a process for
#: it.
NAMED_S = 60
#: How long a run may wait for its devices, in seconds.
DEVICES_S = 3600.0
#: After how many seconds of waiting the user is notified.
NOTIFY_AFTER_S = 2.0
#: How long to wait for Ray to count devices as free again, in seconds.
SETTLED_S = 0.5
#: How often to look whether the session has ended, in seconds.
ENDED_S = 0.1
#: What is written before the reason for which the process ends.
PREFIX = "--distcompat-executor ray: "


def nodes_by_name() -> dict[str, Any]:
    """Connect to the cluster and return its living nodes, those with the most GPUs first.

    All processes get the same names in the same order.

    Raises:
        ConnectionError: If there is no cluster.
    """
    host, colon, port = os.environ.get("RAY_ADDRESS", "").rpartition(":")
    if colon and port.isdecimal() and "/" not in host:
        # Ray itself would try for twelve minutes.
        try:
            address = (host.strip("[]"), int(port))
            socket.create_connection(address, REACHED_S).close()
        except OSError as error:
            raise ConnectionError(f"{host}:{port}: {error}") from None
    import ray

    ray.init(address="auto", logging_level="warning", namespace="distcompat")
    # The head of a cluster often has no GPU, and should not be chosen first.
    alive = [node for node in ray.nodes() if node["Alive"]]

    def most_gpus_first(node: Mapping[str, Any]) -> tuple[float, str]:
        return -_total(node, "GPU"), str(node["NodeID"])

    alive.sort(key=most_gpus_first)
    hosts = [node["NodeManagerHostname"] for node in alive]
    # Several nodes of a cluster can be on one machine. They get numbers, so that names differ.
    by_name = {}
    for number, (host, node) in enumerate(zip(hosts, alive, strict=True)):
        name = host
        if hosts.count(host) > 1:
            name = f"{host}-{number}"
        by_name[name] = node
    return by_name


def _shown(name: str) -> str:
    """Return how messages call a node; its name is empty for the node of pytest's process."""
    return name or "the node of pytest"


def _total(node: Mapping[str, Any], resource: str) -> int:
    """Return how many ``GPU`` or ``CPU`` a node has, in use or not, by Ray's count."""
    return int(node["Resources"].get(resource, 0))


class Placements:
    """The placement group of the current run: at most one at a time.

    Args:
        nodes: Ray's records of the nodes, by name; the name of pytest's own node is empty.
        replaced: Tells whether another request has come, so that the current one is given up.
    """

    def __init__(self, nodes: Mapping[str, Any], replaced: Callable[[], bool]) -> None:
        self._nodes = nodes
        self._replaced = replaced
        self._group: Any = None

    def place(self, asked: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Free the devices of the last run, request those of the next, and yield answers.

        Args:
            asked: The request, the fields of ``Asked``. Without nodes there is no next run.

        Yields:
            Each second ``{"waits": TEXT}``, whose text is for the user if it is not empty. In the
            end ``{"given": {NODE: GPUS}}``, or ``{"refused": WHY}``.
        """
        self.give_back()
        names = asked["nodes"]
        if not names:
            return
        refusal = self._why_refused(asked)
        if refusal:
            yield {"refused": refusal}
            return
        resource = asked["resource"]
        counts: dict[str, int] = {}
        for name in names:
            total = _total(self._nodes[name], resource)
            if total:
                counts[name] = min(asked["most"], total)
        if not counts:
            # A request for CPUs, of which Ray counts none on these nodes. Ranks on CPUs run there
            # all the same.
            yield {"given": {}}
            return
        self._create_group(counts, resource)
        parts = []
        for name, count in counts.items():
            parts.append(f"{count} on {_shown(name)}")
        # Such as "GPUs (2 on n1, 2 on n2)".
        words = f"{resource}s ({', '.join(parts)})"
        yield from self._wait([*counts], asked["who"], words, resource)

    def _why_refused(self, asked: Mapping[str, Any]) -> str | None:
        """Return which nodes never have as many devices as the request needs; None if all have.

        Without this the placement group would wait for ever.
        """
        too_few = []
        for name in asked["nodes"]:
            total = _total(self._nodes[name], asked["resource"])
            if total < asked["least"]:
                too_few.append(f"{_shown(name)} has {total}")
        if not too_few:
            return None
        devices = f"{asked['resource']}s ({asked['least']} on each node)"
        need = f"{asked['who']} needs {devices}"
        return f"{need}; by Ray's count {', '.join(too_few)}"

    def _create_group(self, counts: Mapping[str, int], resource: str) -> None:
        """Create a placement group with so many devices of each node, on just these nodes.

        The agents are warm there, so the group must not be on other nodes.
        """
        from ray.util.placement_group import placement_group

        # All bundles on one node, or each on another one. The labels then say which.
        strategy = "STRICT_PACK" if len(counts) == 1 else "STRICT_SPREAD"
        bundles = [{resource: count} for count in counts.values()]
        labels = [{"ray.io/node-id": self._nodes[name]["NodeID"]} for name in counts]
        self._group = placement_group(bundles, strategy, bundle_label_selector=labels)

    def _wait(
        self, names: Sequence[str], who: str, words: str, resource: str
    ) -> Iterator[dict[str, Any]]:
        """Wait until Ray has created the placement group; yield answers as ``place`` does.

        Args:
            names: The node of each bundle.
            who: The name of the request in messages: the test.
            words: The devices in messages: ``GPUs (2 on n1, 2 on n2)``.
            resource: ``GPU`` or ``CPU``.
        """
        import ray

        began = clock.now()
        notified = False
        # It waits for a second at most, so that pytest hears each second.
        while not self._group.wait(1):
            waited = clock.now() - began
            free = ray.available_resources().get(resource, 0)
            counted = f"by Ray's count {free:g} are free"
            text = f"{who} has waited {waited:.0f} s for {words}; {counted} in the cluster"
            if waited > DEVICES_S or self._replaced():
                # For too long, or pytest has given up this request and sent another.
                self.give_back()
                yield {"refused": text}
                return
            # The user is told once.
            notice = ""
            if waited > NOTIFY_AFTER_S and not notified:
                notice = f"waits for {words}; {counted}"
                notified = True
            yield {"waits": notice}
        try:
            given = self._gpus(names) if resource == "GPU" else {}
            yield {"given": given}
        except ray.exceptions.RayError as error:
            self.give_back()
            yield {"refused": f"Ray did not say which GPUs it gave: {error}"}

    def _gpus(self, names: Sequence[str]) -> dict[str, list[str]]:
        """Return the GPUs of each node's bundle, as in CUDA_VISIBLE_DEVICES there.

        Ray says only to a task that runs in a bundle which GPUs the bundle has. ``names`` are the
        nodes of the bundles, in order.
        """
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        # ``max_calls=0``: by default Ray ends a process that had GPUs, and starts another one in a
        # second.
        options = {"num_cpus": 0, "max_calls": 0, "max_retries": 0}
        answers = []
        for number, bundle in enumerate(self._group.bundle_specs):
            where = PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=number
            )
            decorator: Any = ray.remote(
                **options, num_gpus=bundle["GPU"], scheduling_strategy=where
            )
            answers.append(decorator(_own_gpus).remote())
        return dict(zip(names, ray.get(answers, timeout=NAMED_S), strict=True))

    def give_back(self) -> None:
        """Remove the last run's placement group, and wait until Ray counts its devices as free.

        If they are not free when the next group is requested, Ray tries again after up to a second:
        0.7 to 1.1 s were measured instead of 0.1 s.
        """
        import ray
        from ray.util.placement_group import remove_placement_group

        def free_devices() -> list[float]:
            available = ray.available_resources()
            return [available.get("CPU", 0), available.get("GPU", 0)]

        if self._group is not None:
            before = free_devices()
            remove_placement_group(self._group)
            clock.wait_until(lambda: free_devices() != before, SETTLED_S, every=0.01)
        self._group = None


def _own_gpus() -> list[str]:
    """Return the GPUs of the Ray task that calls this."""
    import ray

    # Ray has them in any order. By length first, so that "10" comes after "9".
    names = ray.get_runtime_context().get_accelerator_ids()["GPU"]
    return sorted(names, key=lambda name: (len(name), name))


def serve(
    nodes: Mapping[str, Any],
    names: Sequence[str],
    join: Sequence[str],
    commands: io.FileIO,
    token: str,
) -> None:
    """Run agents and answer requests for devices, until the session ends.

    Args:
        nodes: Ray's records of all nodes, by name.
        names: The nodes on which agents run.
        join: The command of an agent.
        commands: The standard input, without a buffer.
        token: The token that an agent needs.
    """
    import ray

    # Ray prints to standard output what its tasks, the agents, print. That must not get between the
    # answers: these have a file descriptor of their own, and all else goes to standard error.
    answers = os.dup(1)
    os.dup2(2, 1)
    agents = []
    for name in names:
        agents.append(_start_agent(nodes[name], [*join, "--name", name], token))
    own_id = ray.get_runtime_context().get_node_id()
    own_node = next(node for node in nodes.values() if node["NodeID"] == own_id)

    def has_request(seconds: float = 0) -> bool:
        """Tell whether a line, or the end of the input, comes within so many seconds."""
        return bool(select.select([commands], [], [], seconds)[0])

    placements = Placements({**nodes, "": own_node}, has_request)
    # Until all agents have ended: if a node of the cluster is lost, those of the others go on. All
    # end with this process.
    while ray.wait(agents, num_returns=len(agents), timeout=0)[1]:
        if not has_request(ENDED_S):
            continue
        line = commands.readline()
        if not line:
            # pytest's process is gone. The agents notice that too, and end their ranks, which use
            # the devices until then.
            ray.wait(agents, num_returns=len(agents))
            break
        request = json.loads(line)
        for answer in placements.place(request):
            reply = json.dumps({**answer, "number": request["number"]})
            # pytest's process may be gone.
            with contextlib.suppress(BrokenPipeError):
                os.write(answers, f"{reply}\n".encode())


def _start_agent(node: Mapping[str, Any], command: Sequence[str], token: str) -> Any:
    """Start an agent as a Ray task on a node, and return the task's reference."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    # The task requests no GPU, so Ray would hide all GPUs from the agent. Each run sets which of
    # them its ranks see.
    environment = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
    options = {
        "num_cpus": 0,
        "max_retries": 0,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
        "runtime_env": {"env_vars": environment},
    }
    task: Any = ray.remote(**options)(_agent)
    return task.remote(command, token)


def _agent(command: Sequence[str], token: str) -> int:
    """Run a node agent until it ends; Ray calls this in a process on the agent's node."""
    done = subprocess.run(command, input=f"{token}\n", text=True, check=False)
    return done.returncode


def main(action: str, *arguments: str) -> str:
    """Perform an action of the command line, and return what went wrong, empty if nothing did.

    Args:
        action: ``names`` prints the names of the nodes. ``start`` runs agents on the first nodes,
            ``start_one`` on one node, and both serve requests for devices.
        *arguments: The number of nodes, or the name of the node, then the command of an agent.
    """
    try:
        # Without a buffer, so that ``select`` sees each line.
        commands = io.FileIO(0, closefd=False)
        # The first line is the secret that agents prove to pytest's process that they know.
        token = "" if action == "names" else commands.readline().decode().strip()
        nodes = nodes_by_name()
    except ConnectionError as error:
        return f"no Ray cluster is there ({error}); start one by `ray start`, or set RAY_ADDRESS"
    if action == "names":
        sys.stdout.writelines(f"{name}\n" for name in nodes)
        return ""
    wanted, *join = arguments
    if action == "start_one":
        names = [wanted]
    else:
        names = [*nodes][: int(wanted)]
    if action == "start" and len(names) < int(wanted):
        return f"the cluster has {len(names)} of {wanted} nodes"
    if not {*names} <= {*nodes}:
        return f"the node {wanted} is gone; there are {', '.join(nodes)}"
    serve(nodes, names, join, commands, token)
    return ""


if __name__ == "__main__":
    problem = main(*sys.argv[1:])
    if problem:
        sys.exit(f"{PREFIX}{problem}")
