"""The launcher of runs that span nodes: pytest's side of the node agents. Runs on one node go to another launcher.

On each node an agent runs (``agent``), which joins pytest's process by a channel, is told what to run, and starts the ranks
there. ``Node`` is an agent as pytest sees it. ``NodesLauncher`` has the agents of a session started, waits until all have joined,
and gives them the runs. ``_Run`` is one run. Each node has a part of it, its ranks; the first node opens the store by which they
meet. Agents send what their ranks log; it is written here, and forwarded to the other nodes.

A scheduler, such as Slurm or Ray, may count the devices of the nodes: then each run asks it for them. It may also take all nodes
away, as when the job's time is over; the executor knows whether it does (``Executor.taken``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import queue
import re
import secrets
import shutil
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pytest_distcompat import clock
from pytest_distcompat.decode import decode
from pytest_distcompat.events import Done, of_kind
from pytest_distcompat.ext.cluster.agent import HEARTBEAT_S
from pytest_distcompat.ext.cluster.channel import Channel, Listener, NotProvedError, unreached
from pytest_distcompat.ext.cluster.executors import Asked, Executor, Given
from pytest_distcompat.ext.cluster.facts import differences, facts
from pytest_distcompat.failures import UsageProblem
from pytest_distcompat.launch.forensics.ending import Ending, RankProcess, conclude
from pytest_distcompat.launch.launcher import Launcher, OpenRun
from pytest_distcompat.launch.process import await_exit, kill_and_wait
from pytest_distcompat.launch.rank_log import LogReader
from pytest_distcompat.launch.request import Place, Request, Warmth
from pytest_distcompat.lease.pool import boot_id
from pytest_distcompat.lease.timeline import Span, append
from pytest_distcompat.leased import current_item
from pytest_distcompat.user_input import write_address

#: How long the other nodes may go on after one has ended badly, in seconds; how long a node may take after the time limit.
AFTER_FAILURE_S, AFTER_LIMIT_S = 2.0, 8.0
#: How long a job may be suspended while pytest runs on, in seconds. An agent that never runs again, though its node answers,
#: looks like that.
SUSPENDED_S = 3600.0
#: Events that the other nodes need: all but the large ones, and those with process numbers of this node.
_NOT_FORWARDED = re.compile(r'\{"event": "(start|action|snapshot)"')
_TIME = re.compile(r'"time": (\d+\.\d+)')


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
        """Return the name of one of its devices in the timeline. On this machine it is that of runs on one node."""
        return name if self.boot == boot_id() else f"{self.name} {name}"

    def problem(self) -> str:
        """Return the answer to a message that was sent between runs: what is wrong, perhaps that the node is gone."""
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


@dataclasses.dataclass(frozen=True)
class Settings:
    """The nodes of a session, as its options describe them.

    Attributes:
        nodes: The number of nodes; 1 where one node has all runs of this process (``node``).
        root: The root directory of the session.
        device: ``cpu`` or ``cuda``.
        listen: Where node agents join: host and port.
        token: What they must know; empty for a random one.
        wait: How long they may take to join, in seconds.
        shared: A directory that all nodes must share; empty if they need none.
        node: The node that has all runs of this process, and leases its devices itself; empty where runs span nodes.
        spare: The nodes that have all runs in turn where ``node`` is lost.
        timeline: The directory where leases are recorded.
        worker: The xdist worker whose leases they are.
        gpus: How many GPUs of each node runs may have.
        ranks_each: How many ranks can share a GPU.
        runs_share: Whether runs can share a GPU.
        say: Shows the user what a run waits for.
    """

    nodes: int
    root: str
    device: str
    listen: tuple[str, int]
    token: str
    wait: float
    shared: str = ""
    node: str = ""
    spare: tuple[str, ...] = ()
    timeline: str = ""
    worker: str = ""
    gpus: int = 0
    ranks_each: int = 1
    runs_share: bool = False
    say: Callable[[str], None] = print


class NodesLauncher(Launcher):
    """Launcher that runs requests of several nodes on node agents, and others by the launcher ``on_one_node``."""

    def __init__(
        self,
        on_one_node: Launcher,
        executor: Executor,
        settings: Settings,
        warmth: Warmth,
        session: str,
    ) -> None:
        self._on_one_node = on_one_node
        self._executor = executor
        self._settings = settings
        self._warmth = warmth
        self._session = session
        self._nodes: dict[str, Node] = {}
        #: So that a name is taken once.
        self._admitting = threading.Lock()
        self._listener: Listener | None = None
        self._processes: list[subprocess.Popen[str]] = []
        self._environment = dict(os.environ)
        self._token = settings.token or secrets.token_hex(32)
        #: The agents that were started again, by the node that was lost; None for one that a user has to start.
        self._restarted: dict[Node, subprocess.Popen[str] | None] = {}
        self._spare = list(settings.spare)
        #: The nodes that were found to be alike.
        self._alike: set[Node] = set()
        #: Whether the executor's scheduler counts devices.
        self.accounts = executor.accounts
        #: Why a scheduler takes all nodes away, so that no later run can start; empty while it does not.
        self.taken = ""

    def warm_up(self) -> None:
        """Start the agents that the executor starts, and what runs on one node, unless an agent has that too."""
        if not self._settings.node:
            self._on_one_node.warm_up()
        self._start()

    def _start(self) -> None:
        """Listen for node agents, and have the executor start its own, once."""
        if self._listener is not None:
            return
        host, port = self._settings.listen
        self._listener = Listener(host, port, self._token.encode(), self._admit)
        address = write_address(host, self._listener.port)
        self._join = [sys.executable, "-m", "pytest_distcompat.cli", "join", address]
        self._join += ["--token-file", "-", "--with-parent"]
        if self._settings.node:
            process = self._executor.start_one(self._join, self._settings.node, self._token)
            self._processes = [process] if process is not None else []
        else:
            self._processes = self._executor.start(self._join, self._settings.nodes, self._token)

    def _admit(self, channel: Channel) -> None:
        """Take in a peer that knows the token, or tell it why not. Runs in a thread of its own."""
        node: Node | None = None
        try:
            node = Node(channel, channel.receive())
            with self._admitting:
                refused = self._refusal_reason(node)
                if not refused:
                    self._nodes[node.name] = node
            if refused:
                channel.send({"refused": refused})
                channel.close()
                return
            self._greet(node)
            node.listen()
        except (OSError, NotProvedError, KeyError, ValueError) as error:
            if node is None:
                channel.close()
            else:
                # It has joined: its name must be free for the next agent.
                node.lose(f"its agent went away while it joined ({error})")

    def _greet(self, node: Node) -> None:
        """Tell a node that has joined what it needs to know, and learn its facts."""
        settings = self._settings
        fields = {
            "warmth": dataclasses.asdict(self._warmth),
            "cwd": str(Path.cwd()),
            "device": settings.device,
            "root": settings.root,
            "gpus": settings.gpus,
            "ranks_each": settings.ranks_each,
            "runs_share": settings.runs_share,
            "timeline": settings.timeline,
        }
        node.channel.send(fields)
        node_facts = node.receive("facts")["facts"]
        # Nodes may join minutes apart, so each clock is compared with the one here.
        node_facts["wall"] -= clock.wall()
        if node.boot != boot_id():
            node.measure_clock()
        node.send({"do": "warm", "session": self._session})
        if self.accounts:
            # Its scheduler says whether a node has enough.
            node_facts["gpus"] = 0
        node.facts = node_facts

    def _refusal_reason(self, node: Node) -> str:
        """Return why a node cannot join; empty if it can."""
        known = self._nodes.get(node.name)
        if known is not None and not known.lost:
            return f"a node of that name has joined from {known.channel.peer} already; expected another --name"
        present = [other.name for other in self._nodes.values() if not other.lost]
        if len(present) >= self._settings.nodes:
            return f"all {len(present)} nodes have joined: {', '.join(present)}"
        return ""

    def ready(self) -> str:
        """Wait until all nodes have joined and are alike; return what is wrong, empty if nothing is.

        Agents that were lost since are started again, by an executor that can.
        """
        self._start()
        taken = self._taken()
        if taken:
            return taken
        self._move()
        self._restart_lost()
        clock.wait_until(self._all_joined_or_never_will, self._settings.wait)
        present = self._joined()
        if len(present) < self._settings.nodes:
            for node in self._lost():
                process = self._restarted.get(node)
                if process is not None:
                    # No later test waits for it.
                    kill_and_wait(process)
            return self._describe_missing(present)
        if self._alike == {*present}:
            return ""
        problem = self._difference(sorted(present, key=lambda node: node.name))
        self._alike = set() if problem else {*present}
        return problem

    def _restart_lost(self) -> None:
        """Have agents started again that were lost since they were ready; one that never was ready will not be."""
        if self._settings.node:
            return
        for node in self._lost():
            if node.facts and node not in self._restarted:
                process = self._executor.restart(self._join, node.name, self._token)
                self._restarted[node] = process
                if process is not None:
                    self._processes.append(process)

    def _all_joined_or_never_will(self) -> bool:
        """Tell whether there is nothing left to wait for: all nodes have joined, or one that is missing will not come."""
        if len(self._joined()) >= self._settings.nodes:
            return True
        if self._processes and all(process.poll() is not None for process in self._processes):
            return True
        for node in self._lost():
            process = self._restarted.get(node)
            if process is None or process.poll() is not None:
                return True
        return False

    def _describe_missing(self, present: Sequence[Node]) -> str:
        """Return which nodes are there and what became of those that were lost, and how a node can join."""
        names = ", ".join(node.name for node in present) or "none"
        text = f"{len(present)} of {self._settings.nodes} nodes are there ({names})"
        for node in self._lost():
            text += f"; {node.name}: {node.lost}"
            if self._restarted.get(node):
                text += ", and a new one does not join"
        if self._executor.hint:
            assert self._listener is not None
            address = write_address(self._settings.listen[0], self._listener.port)
            text += f"; {self._executor.hint.replace('HOST:PORT', address)}"
        return text

    def _difference(self, nodes: list[Node]) -> str:
        """Return in what nodes differ from the first, or from pytest's own where one node has all runs; empty if in nothing."""
        first = nodes[0].name
        first_facts = nodes[0].facts
        if self._settings.node:
            first = f"pytest on {socket.gethostname()}"
            device = "cpu" if self.accounts else self._settings.device
            first_facts = {**facts(self._settings.root, self._warmth.own, device), "wall": 0.0}
        texts: list[str] = []
        for node in nodes:
            texts += differences(node.name, node.facts, first, first_facts)
        if texts:
            return "; ".join(texts)
        return self._unshared(nodes) if self._settings.shared else ""

    def _move(self) -> None:
        """Start the agent of the next spare node where the one that has all runs is lost: a preempted one does not come back."""
        while self._spare and self._lost() and not self._joined():
            name = self._spare.pop(0)
            process = self._executor.start_one(self._join, name, self._token)
            if process is not None:
                self._settings.say(
                    f"{self._lost()[-1].name} is lost; {name} has the runs from now on"
                )
                self._processes.append(process)
                self._await_agent(process)

    def _await_agent(self, process: subprocess.Popen[str]) -> None:
        clock.wait_until(
            lambda: bool(self._joined()) or process.poll() is not None, self._settings.wait
        )

    def _joined(self) -> list[Node]:
        """Return the nodes that have joined and are there."""
        return [node for node in list(self._nodes.values()) if node.facts and not node.lost]

    def _unshared(self, nodes: list[Node]) -> str:
        """Return which node has another directory in place of the shared one; empty if pytest sees what all write there."""
        shared = self._settings.shared
        # A node that can write below this new directory sees what pytest makes.
        directory = Path(shared, f"nodes-{uuid.uuid4().hex[:8]}")
        directory.mkdir(parents=True)
        files = {node: directory / str(number) for number, node in enumerate(nodes)}
        problem_by_node = _problems(nodes, lambda node: {"do": "write", "path": str(files[node])})
        texts = []
        for node, problem in problem_by_node.items():
            if problem:
                texts.append(f"{node.name} cannot write in {shared} ({problem})")
        for node, path in files.items():
            if not path.exists():
                texts.append(
                    f"pytest on {socket.gethostname()} does not see what {node.name} wrote in {shared}"
                )
        shutil.rmtree(directory, ignore_errors=True)
        if not texts:
            return ""
        advice = (
            "suites, and tests with shared_dir, need a directory that all nodes share; expected --basetemp=DIR with one, "
            "or cells with option checkpoints='node', where the driver has it"
        )
        return f"{texts[0]}: {advice}"

    def _taken(self) -> str:
        """Find out, once nodes are lost, whether a scheduler takes all of them away."""
        if not self.taken and self._lost():
            self.taken = self._executor.taken()
        return self.taken

    def _lost(self) -> list[Node]:
        return [node for node in list(self._nodes.values()) if node.lost]

    def get_warm(self) -> str:
        """Wait until what runs on one node is ready; return what is wrong with it."""
        return self._on_one_node.get_warm()

    def run(self, request: Request) -> Ending:
        """Run the request on its nodes."""
        if request.nodes == 1 and not self._settings.node and not request.payload.get("per_node"):
            return self._on_one_node.run(request)
        problem = self.ready()
        if problem:
            return Ending.not_launched(request.world_size, problem)
        present = [node for node in self._nodes.values() if not node.lost]
        nodes = sorted(present, key=lambda node: node.name)[: request.nodes]
        # Imports take seconds on each node, and the time limit begins with the ranks.
        not_warm = []
        for node, cold_reason in _problems(nodes, lambda _: {"do": "get_warm"}).items():
            if cold_reason:
                not_warm.append(f"{node.name}: {cold_reason}")
        if not_warm:
            return Ending.not_launched(request.world_size, "\n".join(not_warm))
        try:
            return self._run_on(nodes, request)
        except UsageProblem as error:
            return Ending.not_launched(request.world_size, str(error))

    def _run_on(self, nodes: list[Node], request: Request) -> Ending:
        """Run the request on these nodes once it has its devices, and record the lease of those that a scheduler gave."""
        who = current_item() or request.directory
        requested_at = clock.now()
        with self.devices(nodes, request.world_size // request.nodes, who) as given:
            granted_at = clock.now()
            run = _Run(
                nodes, request.from_here(), self._environment, self._settings, self._taken, given
            )
            ending = run.run()
            if run.devices:
                # One node that leases devices has noted them itself.
                span = Span(
                    run.devices,
                    who,
                    os.getpid(),
                    requested_at,
                    granted_at,
                    clock.now(),
                    worker=self._settings.worker,
                )
                # The record is for reports only.
                with contextlib.suppress(OSError):
                    append(Path(self._settings.timeline), span)
            return ending

    def devices(
        self, nodes: Sequence[Node], ranks: int, who: str
    ) -> contextlib.AbstractContextManager[Given]:
        """Hold devices for so many ranks on each of these nodes, or on pytest's own, if the executor's scheduler counts them."""
        self._start()
        settings = self._settings
        names = [node.name for node in nodes] or [""]
        if settings.device == "cpu":
            # Ranks can share cores.
            asked = Asked(names, "CPU", 0, ranks, who)
        else:
            # Rounded up.
            least = -(-ranks // settings.ranks_each)
            asked = Asked(names, "GPU", least, min(ranks, settings.gpus), who)

        def say(text: str) -> None:
            lost = [f"{node.name}: {node.lost}" for node in nodes if node.lost]
            if lost:
                raise UsageProblem("; ".join(lost))
            if text:
                settings.say(text)

        return self._executor.devices(asked, say)

    @property
    def can_open(self) -> bool:
        """Tell whether runs of one node, if they are on this one, can be held open."""
        return not self._settings.node and self._on_one_node.can_open

    def open(self, request: Request, target: str) -> OpenRun:
        """Start ranks on this node that get requests."""
        return self._on_one_node.open(request, target)

    def close(self) -> None:
        """End all node agents that were started, and let the others go."""
        for node in list(self._nodes.values()):
            node.send({"do": "close"})
        for process in self._processes:
            await_exit(process, 5.0)
            kill_and_wait(process)
            for pipe in (process.stdin, process.stdout):
                # A line may be left that it did not read.
                with contextlib.suppress(OSError):
                    if pipe is not None:
                        pipe.close()
        if self._listener is not None:
            self._listener.close()
        for node in list(self._nodes.values()):
            node.channel.close()
        self._on_one_node.close()


def _problems(nodes: list[Node], message: Callable[[Node], Mapping[str, Any]]) -> dict[Node, str]:
    """Send each node a message, then wait for their answers: what is wrong, empty if nothing is."""
    for node in nodes:
        node.send(message(node))
    return {node: node.problem() for node in nodes}


@dataclasses.dataclass(eq=False)
class _Run:
    """One run on several nodes, or on one that leases its devices.

    Attributes:
        nodes: The nodes; the first has the lowest ranks and opens the store.
        request: What is run.
        environment: The environment of this process when the session began; nodes are sent what has changed since.
        settings: The nodes of the session.
        taken: Returns why a scheduler takes all nodes away; empty if it does not.
        given: The GPUs that a scheduler gave the run, by node.
    """

    nodes: list[Node]
    request: Request
    environment: Mapping[str, str]
    settings: Settings
    taken: Callable[[], str]
    given: Given

    def __post_init__(self) -> None:
        self._directory = Path(self.request.directory)
        self._ranks_each = self.request.world_size // len(self.nodes)
        #: By the name of each node that has ended its part of the run: how it ended.
        self._parts: dict[str, dict[str, Any]] = {}
        #: When a part failed, and when the others were told to stop.
        self._failed_at: float | None = None
        self._stopped_at: float | None = None
        #: How many beats each node had given when the time limit began; empty before.
        self._counted_from: dict[Node, int] = {}
        #: The nodes that were suspended at the last look, and when that was.
        self._suspended: list[Node] = []
        self._looked_at = clock.now()
        #: Since when some node has been suspended; counted anew after this process was stopped itself.
        self._suspended_since = self._looked_at
        #: The variables of the environment that tests have set, and those that they have removed.
        self._set = {
            name: value for name, value in os.environ.items() if self.environment.get(name) != value
        }
        self._unset = [name for name in self.environment if name not in os.environ]
        if not self.settings.node:
            # A node that leases devices says for which test.
            self._set.pop("PYTEST_CURRENT_TEST", None)

    def run(self) -> Ending:
        """Start the parts, follow them to their ends, and conclude."""
        self.request.write()
        began = clock.now()
        if not self.settings.node:
            # A node that leases its devices may wait for them first: there the limit begins with the first line of a rank's log.
            self._begin_time_limit()
        run_id = uuid.uuid4().hex
        self._send(0, run_id, (self.nodes[0].channel.peer, 0))
        all_started = len(self.nodes) == 1
        while len(self._parts) < len(self.nodes):
            messages = self._receive()
            for message in messages:
                if message["is"] == "log" and not self._counted_from:
                    self._begin_time_limit()
                elif message["is"] == "listens" and not all_started:
                    self._start_others(run_id, message["store"])
                    all_started = True
            self._note_lost()
            if not all_started and self._parts:
                # The first node has ended and has not opened the store, so the others never start.
                for node in self.nodes[1:]:
                    self._parts[node.name] = _NOT_STARTED
            if self._failed_at is None and any(_has_failed(part) for part in self._parts.values()):
                self._failed_at = clock.now()
            self._stop_late()
            if not messages:
                clock.sleep(0.005)
        return self._conclude(began)

    def _start_others(self, run_id: str, store: Sequence[Any]) -> None:
        """Start the parts of all nodes but the first, which has opened the store."""
        host, port = store
        for number in range(1, len(self.nodes)):
            self._send(number, run_id, (host, port))

    def _note_lost(self) -> None:
        """Note how the parts of nodes ended that are gone."""
        for node in self.nodes:
            if node.lost and node.name not in self._parts:
                taken = self.taken()
                why = f"{node.lost}: {taken}" if taken else node.lost
                self._parts[node.name] = {"processes": {}, "known": {}, "lost": why, "output": {}}

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices that a scheduler gave the run on its nodes, as far as they have ended it."""
        names = []
        for node in self.nodes:
            for device in self._parts[node.name].get("devices", ()):
                names.append(node.device(device))
        return tuple(names)

    def _send(self, number: int, run_id: str, store: tuple[str, int]) -> None:
        """Start the part of the ``number``-th node; the nodes meet on ``store``, host and port."""
        node = self.nodes[number]
        place = {}
        if not self.settings.node:
            place = dataclasses.asdict(
                Place(number, len(self.nodes), node.channel.peer, store, run_id)
            )
        message = {
            "do": "run",
            "request": dataclasses.asdict(self.request),
            "place": place,
            "set": self._set,
            "unset": self._unset,
            "id": run_id[:8],
            "gpus": self.given.get(node.name, ()),
        }
        node.send(message)

    def _receive(self) -> list[dict[str, Any]]:
        """Return the messages of all nodes that have arrived, once their logs are written and forwarded."""
        messages = []
        for node in self.nodes:
            while not node.messages.empty():
                message = node.messages.get()
                messages.append(message)
                self._take_in(node, message)
        return messages

    def _take_in(self, node: Node, message: dict[str, Any]) -> None:
        """Write down what a node says: lines of a log, what it waits for, or how its part ended."""
        if message["is"] == "log":
            self._log(node, message["rank"], message["lines"])
        elif message["is"] == "waits":
            self.settings.say(f"{node.name}: {message['text']}")
        elif message["is"] == "ended":
            self._parts[node.name] = message
            for fields in message.get("spans", ()):
                span = decode(Span, fields).on_node(node.name, node.ahead, self.settings.worker)
                append(Path(self.settings.timeline), span)

    def _log(self, node: Node, rank: int, lines: str) -> None:
        """Write lines of a rank's log, with times by the clock here, and forward to other nodes what they need."""
        own_lines = [_shifted(line, -node.ahead) for line in lines.splitlines()]
        with (self._directory / f"rank-{rank}.jsonl").open("a", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in own_lines)
        forwarded = [_without_pid(line) for line in own_lines if not _NOT_FORWARDED.match(line)]
        if not forwarded:
            return
        for other in self.nodes:
            if other is not node:
                text = "".join(f"{_shifted(line, other.ahead)}\n" for line in forwarded)
                other.send({"do": "log", "rank": rank, "lines": text})

    def _begin_time_limit(self) -> None:
        """Begin the time limit, which counts beats of the agents and not seconds: a suspended job has no beats, and no time."""
        self._counted_from = {node: node.beats for node in self.nodes}

    def _stop_late(self) -> None:
        """End the parts that outlive the failure of another one, or the time limit."""
        now = clock.now()
        running = [node for node in self.nodes if node.name not in self._parts]
        self._note_suspended(running, now)
        if self._stopped_at is not None:
            if now > self._stopped_at + AFTER_LIMIT_S:
                for node in running:
                    node.lose("did not end its ranks in time")
            return
        outlives_failure = self._failed_at is not None and now > self._failed_at + AFTER_FAILURE_S
        if outlives_failure or self._is_over(running):
            self._stopped_at = now
            for node in running:
                node.send({"do": "stop", "why": "another node has ended"})

    def _note_suspended(self, running: Sequence[Node], now: float) -> None:
        """Tell the user of nodes whose agents do not run, and give up those that are suspended for too long.

        Args:
            running: The nodes that have not ended their parts.
            now: The time, by ``clock.now``.
        """
        # Where this process has not looked for so long it was stopped itself, as a whole job is, and all nodes with it.
        suspended: list[Node] = []
        for node in running:
            if now - min(self._looked_at, node.beat_at) > clock.GAP_S:
                suspended.append(node)
        if suspended and not self._suspended:
            names = ", ".join(node.name for node in suspended)
            self.settings.say(
                f"{names}: stopped, as in a suspended job, or very busy; time limits wait"
            )
        if not self._suspended or now - self._looked_at > clock.GAP_S:
            self._suspended_since = now
        self._suspended = suspended
        self._looked_at = now
        if now - self._suspended_since > SUSPENDED_S:
            for node in suspended:
                node.lose(
                    f"its agent has not run for {SUSPENDED_S / 60:g} minutes, though the node answers"
                )

    def _is_over(self, running: Sequence[Node]) -> bool:
        """Tell whether the time limit has passed on all nodes that still run their parts."""
        if not self._counted_from:
            return False
        limit = (self.request.timeout + AFTER_LIMIT_S) / HEARTBEAT_S
        return all(node.beats - self._counted_from[node] > limit for node in running)

    def _conclude(self, began: float) -> Ending:
        """Return how the run ended, from the logs of all ranks and what each node knew of its processes."""
        processes: dict[int, RankProcess] = {}
        errors: list[str] = []
        events = LogReader(self._directory, range(self.request.world_size)).read()
        for number, node in enumerate(self.nodes):
            part = self._parts[node.name]
            ranks = range(number * self._ranks_each, (number + 1) * self._ranks_each)
            for rank in ranks:
                processes[rank] = _process_of(rank, node, part)
            if "lost" in part:
                # A rank that had not finished says so itself.
                if all(of_kind(Done, events[rank]) for rank in ranks):
                    errors.append(f"{node.name}: {part['lost']}")
            elif part["known"].get("launch_error"):
                errors.append(f"{node.name}: {part['known']['launch_error']}")
            self._write_output(part["output"])
            for name, text in part.get("recorded", {}).items():
                (self._directory / name).write_text(text, encoding="utf-8")
        ending = conclude(
            events,
            processes,
            **self._known_of_run(),
            launch_error="\n".join(errors),
            seconds=clock.now() - began,
            command=self.request.command(),
        )
        leaks: list[str] = []
        for part in self._parts.values():
            leaks += part.get("leaks", ())
        return dataclasses.replace(ending, leaks=tuple(leaks))

    def _known_of_run(self) -> dict[str, Any]:
        """Return what the nodes know of how their parts ended, put together for the run: arguments of ``conclude``.

        A part that a node has no answer for, because it is lost or was never started, does not count.
        """
        timed_out = False
        ended_since = math.inf
        oom_kills = 0
        first: int | None = None
        left_over: list[str] = []
        notice = ""
        for node in self.nodes:
            known = self._parts[node.name]["known"]
            timed_out = timed_out or bool(known.get("timed_out"))
            ended_since = min(ended_since, known.get("ended_since", math.inf) - node.ahead)
            oom_kills = max(oom_kills, known.get("oom_kills", 0))
            if first is None:
                first = known.get("first")
            left_over += [f"{process} on {node.name}" for process in known.get("left_over", ())]
            notice = notice or known.get("notice", "")
        return {
            "timed_out": timed_out,
            "timeout": self.request.timeout,
            "ended_since": ended_since,
            "oom_kills": oom_kills,
            "first": first,
            "left_over": tuple(left_over),
            "notice": notice,
        }

    def _write_output(self, output: Mapping[str, Mapping[str, str]]) -> None:
        """Write what the ranks of a node wrote to where reports look for it."""
        for rank, texts in output.items():
            for kind, text in texts.items():
                logs = self._directory / "logs" / "nodes" / "attempt_0" / rank
                path = (
                    self._directory / f"rank-{rank}.log" if kind == "log" else logs / f"{kind}.log"
                )
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")


#: The part of a node whose ranks were never started.
_NOT_STARTED: dict[str, Any] = {"processes": {}, "known": {}, "output": {}}


def _has_failed(part: Mapping[str, Any]) -> bool:
    """Tell whether a node's part of the run has ended badly."""
    if "lost" in part or part["known"].get("launch_error"):
        return True
    codes = [process["code"] for process in part["processes"].values()]
    return not codes or any(codes)


def _process_of(rank: int, node: Node, part: Mapping[str, Any]) -> RankProcess:
    """Return how the process of a rank ended, with times by the clock here."""
    fields = part["processes"].get(str(rank), {"lost": part.get("lost", "")})
    process = RankProcess(**{**fields, "node": node.name})
    if process.ended_at is not None:
        return dataclasses.replace(process, ended_at=process.ended_at - node.ahead)
    if process.lost:
        return dataclasses.replace(process, ended_at=node.lost_at)
    return process


def _shifted(line: str, seconds: float) -> str:
    """Return the line of an event with its time by another node's clock."""
    if not seconds:
        return line
    return _TIME.sub(lambda match: f'"time": {float(match[1]) + seconds}', line, count=1)


def _without_pid(line: str) -> str:
    """Return the line without the number of its process, which means nothing on another node."""
    if line.startswith('{"event": "done"'):
        return json.dumps({**json.loads(line), "pid": None})
    return line
