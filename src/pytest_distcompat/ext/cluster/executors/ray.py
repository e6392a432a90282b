"""Executor ``ray``: node agents on the nodes of a Ray cluster that is there, and a placement group for each run.

Run as a module, this file is the process that talks to Ray: pytest's own process does not import ray. The agents are tasks that
hold no resources, so they stay warm while others use the devices. A line of JSON on this process' standard input asks for the
devices of a run, and gives those of the line before back; a line on its standard output answers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
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
from pytest_distcompat.ext.cluster.executors._base import Asked, Executor, Given
from pytest_distcompat.failures import UsageProblem

#: How long the address of the cluster may take to answer, in seconds.
REACHED_S = 10
#: How long a task in a bundle may take to name the bundle's GPUs, in seconds: it may need a new process of Ray.
NAMED_S = 60
#: How long a run may wait for its devices, and after how many seconds a notice says so.
DEVICES_S, NOTIFY_AFTER_S = 3600.0, 2.0
#: How long Ray may take to count devices as free that were given back, in seconds.
SETTLED_S = 0.5
#: How often it is noticed that the session has ended, in seconds.
ENDED_S = 0.1
_PREFIX = "--distcompat-executor ray: "


class Ray(Executor):
    """Node agents on nodes of the cluster that ``RAY_ADDRESS`` names, or that runs on this machine."""

    name = "ray"
    listen = (socket.gethostname(), 0)
    # pytest's own process does not import ray, and another one takes seconds.
    lists_at_once = False
    accounts = True

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._number = 0

    def unsupported_reason(self) -> str | None:
        """Return why there is no Ray to use; None if there is."""
        if importlib.util.find_spec("ray"):
            return None
        return "ray is not installed: pip install 'pytest-distcompat[ray]'"

    def names(self, nodes: int) -> list[str]:
        """Return the first nodes of the cluster. Raises UsageProblem if no cluster is there."""
        listed = subprocess.run(
            [sys.executable, "-m", __name__, "names"], check=False, capture_output=True, text=True
        )
        if listed.returncode:
            raise UsageProblem(listed.stderr.strip().rpartition(_PREFIX)[2])
        return listed.stdout.split()[:nodes]

    def start(self, join: Sequence[str], nodes: int, token: str) -> list[subprocess.Popen[str]]:
        """Start the process that starts the agents of the first nodes."""
        self._process = self._popen(
            [sys.executable, "-m", __name__, "start", str(nodes), *join], token, answers=True
        )
        return [self._process]

    def start_one(self, join: Sequence[str], name: str, token: str) -> subprocess.Popen[str]:
        """Start the process that starts the agent of one node."""
        self._process = self._popen(
            [sys.executable, "-m", __name__, "start_one", name, *join], token, answers=True
        )
        return self._process

    @contextlib.contextmanager
    def devices(self, asked: Asked, say: Callable[[str], None]) -> Iterator[Given]:
        """Hold a placement group inside the block."""
        self._number += 1
        answer: dict[str, Any] = {"number": 0}
        try:
            self._send({**dataclasses.asdict(asked), "number": self._number})
            while answer["number"] != self._number or "waits" in answer:
                if answer["number"] == self._number:
                    say(answer["waits"])
                assert self._process is not None
                assert self._process.stdout is not None
                answer = json.loads(self._process.stdout.readline())
        except (OSError, json.JSONDecodeError):
            raise UsageProblem("the process that asks Ray for devices has ended") from None
        except BaseException:
            # A run that does not wait any more has no ranks yet.
            self._give_back()
            raise
        if "refused" in answer:
            raise UsageProblem(answer["refused"])
        yield answer["given"]
        # Not where an exception ends the block, whose ranks may still run: the next run, or the end of all agents, gives it back.
        self._give_back()

    def _give_back(self) -> None:
        """Give back the devices of the last run."""
        with contextlib.suppress(OSError):
            self._send({"nodes": []})

    def _send(self, request: Mapping[str, Any]) -> None:
        """Send the process what a run needs, the fields of ``Asked``."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(f"{json.dumps(request)}\n")
        self._process.stdin.flush()


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
    # The head of a cluster often has no GPU.
    alive = [node for node in ray.nodes() if node["Alive"]]
    alive.sort(key=lambda node: (-_total(node, "GPU"), str(node["NodeID"])))
    hosts = [node["NodeManagerHostname"] for node in alive]
    # Several nodes of a cluster can be on one machine.
    by_name = {}
    for number, (host, node) in enumerate(zip(hosts, alive, strict=True)):
        name = host if hosts.count(host) == 1 else f"{host}-{number}"
        by_name[name] = node
    return by_name


def _shown(name: str) -> str:
    return name or "the node of pytest"


def _total(node: Mapping[str, Any], resource: str) -> int:
    """Return how many of a resource Ray counts on a node."""
    return int(node["Resources"].get(resource, 0))


class Placements:
    """Placement groups for runs on these nodes, one at a time; ``replaced`` tells whether a run has stopped to wait."""

    def __init__(self, nodes: Mapping[str, Any], replaced: Callable[[], bool]) -> None:
        self._nodes = nodes
        self._replaced = replaced
        self._group: Any = None

    def place(self, asked: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Give the devices of the last run back, and yield answers to the fields of ``Asked``.

        They are each second what the run ``waits`` for, or an empty text, then what is ``given``, or why it is ``refused``. A run
        on one node gets a group ``STRICT_PACK``, one on several ``STRICT_SPREAD``, bound to the nodes, whose agents are warm.
        """
        from ray.util.placement_group import placement_group

        self.give_back()
        names = asked["nodes"]
        if not names:
            return
        resource = asked["resource"]
        too_few = []
        bundles = {}
        for name in names:
            total = _total(self._nodes[name], resource)
            if total < asked["least"]:
                too_few.append(f"{_shown(name)} has {total}")
            if total:
                bundles[name] = {resource: min(asked["most"], total)}
        if too_few:
            need = f"{asked['who']} needs {resource}s ({asked['least']} on each node)"
            yield {"refused": f"{need}; by Ray's count {', '.join(too_few)}"}
            return
        if not bundles:
            # Ranks on CPUs do without, on a node that Ray counts none of.
            yield {"given": {}}
            return
        strategy = "STRICT_PACK" if len(bundles) == 1 else "STRICT_SPREAD"
        labels = [{"ray.io/node-id": self._nodes[name]["NodeID"]} for name in bundles]
        self._group = placement_group([*bundles.values()], strategy, bundle_label_selector=labels)
        parts = [f"{bundle[resource]} on {_shown(name)}" for name, bundle in bundles.items()]
        yield from self._wait(
            [*bundles], asked["who"], f"{resource}s ({', '.join(parts)})", resource
        )

    def _wait(
        self, names: Sequence[str], who: str, words: str, resource: str
    ) -> Iterator[dict[str, Any]]:
        """Wait until the placement group is there; yield answers as ``place`` does."""
        import ray

        began = clock.now()
        notified = False
        while not self._group.wait(1):
            waited = clock.now() - began
            free = ray.available_resources().get(resource, 0)
            text = f"{who} has waited {waited:.0f} s for {words}; by Ray's count {free:g} are free in the cluster"
            if waited > DEVICES_S or self._replaced():
                self.give_back()
                yield {"refused": text}
                return
            notice_due = waited > NOTIFY_AFTER_S and not notified
            yield {
                "waits": f"waits for {words}; by Ray's count {free:g} are free"
                if notice_due
                else ""
            }
            notified = notified or notice_due
        try:
            yield {"given": self._gpus(names) if resource == "GPU" else {}}
        except ray.exceptions.RayError as error:
            self.give_back()
            yield {"refused": f"Ray did not say which GPUs it gave: {error}"}

    def _gpus(self, names: Sequence[str]) -> dict[str, list[str]]:
        """Return the GPUs of each bundle, as CUDA_VISIBLE_DEVICES of its node has them."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        # By default Ray ends a process that had GPUs, and a new one takes a second.
        options = {"num_cpus": 0, "max_calls": 0, "max_retries": 0}
        named = []
        for number, bundle in enumerate(self._group.bundle_specs):
            where = PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=number
            )
            task: Any = ray.remote(**options, num_gpus=bundle["GPU"], scheduling_strategy=where)(
                _own_gpus
            )
            named.append(task.remote())
        return dict(zip(names, ray.get(named, timeout=NAMED_S), strict=True))

    def give_back(self) -> None:
        """Remove the group of the last run, and wait until Ray counts its devices as free.

        Ray tries a group again after up to a second if they are not when it is asked for: measured, 0.7 to 1.1 s instead of 0.1.
        """
        import ray
        from ray.util.placement_group import remove_placement_group

        def free() -> list[float]:
            available = ray.available_resources()
            return [available.get("CPU", 0), available.get("GPU", 0)]

        if self._group is not None:
            before = free()
            remove_placement_group(self._group)
            clock.wait_until(lambda: free() != before, SETTLED_S, every=0.01)
        self._group = None


def _own_gpus() -> list[str]:
    """Return the GPUs of this task of Ray."""
    import ray

    # Ray has them in any order.
    return sorted(
        ray.get_runtime_context().get_accelerator_ids()["GPU"], key=lambda name: (len(name), name)
    )


def serve(
    nodes: Mapping[str, Any],
    names: Sequence[str],
    join: Sequence[str],
    commands: io.FileIO,
    token: str,
) -> None:
    """Run an agent on each of these nodes, and give runs their devices, until the session ends."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    # What the agents print goes to standard output too.
    answers = os.dup(1)
    os.dup2(2, 1)
    # Ray hides GPUs from a task that asked for none, but the agent's ranks get some later. Each run sets what its ranks see.
    visible = {"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}}
    agents = []
    for name in names:
        where = NodeAffinitySchedulingStrategy(nodes[name]["NodeID"], soft=False)
        options = {
            "num_cpus": 0,
            "max_retries": 0,
            "scheduling_strategy": where,
            "runtime_env": visible,
        }
        agent: Any = ray.remote(**options)(_agent)
        agents.append(agent.remote([*join, "--name", name], token))
    own_id = ray.get_runtime_context().get_node_id()
    own_node = next(node for node in nodes.values() if node["NodeID"] == own_id)

    def comes(seconds: float = 0) -> bool:
        return bool(select.select([commands], [], [], seconds)[0])

    placements = Placements({**nodes, "": own_node}, comes)
    # Where a node of the cluster is gone, the agents of the others go on; they end with this process.
    while ray.wait(agents, num_returns=len(agents), timeout=0)[1]:
        if not comes(ENDED_S):
            continue
        line = commands.readline()
        if not line:
            # pytest's process is gone. Its agents notice too: until they have ended their ranks, the devices are in use.
            ray.wait(agents, num_returns=len(agents))
            break
        asked = json.loads(line)
        for answer in placements.place(asked):
            reply = json.dumps({**answer, "number": asked["number"]})
            # pytest's process may be gone.
            with contextlib.suppress(BrokenPipeError):
                os.write(answers, f"{reply}\n".encode())


def _agent(command: Sequence[str], token: str) -> int:
    """Run a node agent, in a process of Ray on its node."""
    return subprocess.run(command, input=f"{token}\n", text=True, check=False).returncode


def main(action: str, *arguments: str) -> str:
    """Do one of ``names``, ``start`` and ``start_one``; return what is wrong, empty if nothing is."""
    try:
        # Without a buffer, so that ``select`` sees each line.
        commands = io.FileIO(0, closefd=False)
        token = "" if action == "names" else commands.readline().decode().strip()
        nodes = nodes_by_name()
    except ConnectionError as error:
        return f"no Ray cluster is there ({error}); start one by `ray start`, or set RAY_ADDRESS"
    if action == "names":
        sys.stdout.writelines(f"{name}\n" for name in nodes)
        return ""
    wanted, *join = arguments
    names = [wanted] if action == "start_one" else [*nodes][: int(wanted)]
    if action == "start" and len(names) < int(wanted):
        return f"the cluster has {len(names)} of {wanted} nodes"
    if not {*names} <= {*nodes}:
        return f"the node {wanted} is gone; there are {', '.join(nodes)}"
    serve(nodes, names, join, commands, token)
    return ""


if __name__ == "__main__":
    problem = main(*sys.argv[1:])
    if problem:
        sys.exit(f"{_PREFIX}{problem}")
