"""The launcher of runs that span nodes: pytest's side of the node agents. Runs on one node go to another launcher."""

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
from pytest_distcompat.executors import Asked, Executor, Given
from pytest_distcompat.failures import UsageProblem
from pytest_distcompat.launch.ending import Ending, RankProcess, conclude
from pytest_distcompat.launch.launcher import Launcher
from pytest_distcompat.launch.process import await_exit, kill_and_wait
from pytest_distcompat.launch.rank_log import LogReader
from pytest_distcompat.launch.request import Place, Request, Warmth
from pytest_distcompat.launch.reused_ranks import Reuse
from pytest_distcompat.lease.pool import boot_id
from pytest_distcompat.lease.timeline import Span, append
from pytest_distcompat.leased import current_item
from pytest_distcompat.nodes.agent import HEARTBEAT_S
from pytest_distcompat.nodes.channel import Channel, Listener, NotProvedError, unreached
from pytest_distcompat.nodes.facts import differences, facts
from pytest_distcompat.user_input import write_address

#: How long the other nodes may go on after one has ended badly, in seconds; how long a node may take after the time limit.
AFTER_FAILURE_S, AFTER_LIMIT_S = 2.0, 8.0
#: How long a job may be suspended while pytest runs on, in seconds. A process that its own node holds for ever looks alike.
SUSPENDED_S = 3600.0
#: Events that the other nodes need: all but the large ones, and those with process numbers of this node.
_NOT_FORWARDED = re.compile(r'\{"event": "(start|action|snapshot)"')
_TIME = re.compile(r'"time": (\d+\.\d+)')


class Node:
    """A node that has joined, as pytest's process sees it."""

    def __init__(self, channel: Channel, hello: Mapping[str, Any]) -> None:
        self.channel, self.name, self.boot = channel, str(hello["name"]), str(hello["boot"])
        #: Why it is gone, and when that was noticed; empty while it is there.
        self.lost, self.lost_at = "", 0.0
        self.messages: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.facts: dict[str, Any] = {}
        #: How often its agent has said that it runs, about once a second, and when it did last.
        self.beats, self.beat_at = 0, clock.now()
        #: By how much its CLOCK_MONOTONIC is ahead of ours.
        self.ahead = 0.0

    def measure_clock(self) -> None:
        """Find out how far ahead its clock is, from the fastest of several answers."""
        fastest = math.inf
        for _ in range(5):
            asked = clock.now()
            self.channel.send({"do": "time"})
            while (answer := self.channel.receive())["is"] != "time":
                pass
            took = clock.now() - asked
            if took < fastest:
                fastest, self.ahead = took, answer["now"] - asked - took / 2

    def listen(self) -> None:
        """Receive until the node is gone."""
        try:
            while True:
                message = self.channel.receive()
                if message["is"] == "beat":
                    self.beats, self.beat_at = self.beats + 1, clock.now()
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
            self.lost, self.lost_at = why, clock.now()
        self.channel.close()

    def _lose_by(self, error: Exception) -> None:
        silent = "sent nothing for some seconds: the link is cut, or the node is down"
        self.lose(silent if unreached(error) else f"its agent is gone ({error})")

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

    ``listen`` is where node agents join, host and port; ``token`` what they must know; ``wait`` how long they may take;
    ``shared`` a directory that all nodes must share, empty if they need none. ``node`` is the node that has all runs of this
    process, and ``spare`` are those that have them in turn where it is lost; then ``nodes`` is 1, and the node leases its
    devices. ``timeline`` is where the leases of the xdist worker ``worker`` are recorded. ``say`` shows what a run waits for.
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
    """Launcher that runs requests of several nodes on node agents, and others by ``one``."""

    def __init__(self, one: Launcher, executor: Executor, settings: Settings, warmth: Warmth, session: str) -> None:
        self._one, self._executor, self._settings = one, executor, settings
        self._warmth, self._session = warmth, session
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
        #: Why a scheduler takes the nodes away; empty while it does not. Then no later run can start.
        self.taken = ""

    def warm_up(self) -> None:
        """Start the agents that the executor starts, and what runs on one node, unless an agent has that too."""
        if not self._settings.node:
            self._one.warm_up()
        self._start()

    def _start(self) -> None:
        if self._listener is None:
            host, port = self._settings.listen
            self._listener = Listener(host, port, self._token.encode(), self._admit)
            self._join = [
                sys.executable,
                "-m",
                "pytest_distcompat.cli",
                "join",
                write_address(host, self._listener.port),
            ]
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
                refused = self._refused(node)
                if not refused:
                    self._nodes[node.name] = node
            if refused:
                channel.send({"refused": refused})
                channel.close()
                return
            warmth = dataclasses.asdict(self._warmth)
            settings = self._settings
            names = ("device", "root", "gpus", "ranks_each", "runs_share", "timeline")
            fields = {name: getattr(settings, name) for name in names}
            channel.send({"warmth": warmth, "cwd": str(Path.cwd()), **fields})
            while (message := channel.receive())["is"] != "facts":
                pass
            # Nodes may join minutes apart, so each clock is compared with the one here.
            message["facts"]["wall"] -= clock.wall()
            if node.boot != boot_id():
                node.measure_clock()
            node.send({"do": "warm", "session": self._session})
            if self.accounts:
                # Its scheduler says whether a node has enough.
                message["facts"]["gpus"] = 0
            node.facts = message["facts"]
            node.listen()
        except (OSError, NotProvedError, KeyError, ValueError) as error:
            if node is None:
                channel.close()
            else:
                # It has joined: its name must be free for the next agent.
                node.lose(f"its agent went away while it joined ({error})")

    def _refused(self, node: Node) -> str:
        known = self._nodes.get(node.name)
        if known is not None and not known.lost:
            return f"a node of that name has joined from {known.channel.peer} already; expected another --name"
        present = [one.name for one in self._nodes.values() if not one.lost]
        full = len(present) >= self._settings.nodes
        return f"all {len(present)} nodes have joined: {', '.join(present)}" if full else ""

    def ready(self) -> str:  # noqa: C901 - one wait, and what came of it
        """Wait until all nodes have joined and are alike; return what is wrong, empty if nothing is.

        Agents that were lost since are started again, by an executor that can.
        """
        self._start()
        if taken := self._taken():
            return taken
        self._move()
        for node in self._lost():
            # One that never was ready will not be.
            if node.facts and node not in self._restarted and not self._settings.node:
                process = self._restarted[node] = self._executor.restart(self._join, node.name, self._token)
                self._processes += [process] if process is not None else []

        def gone(node: Node) -> bool:
            process = self._restarted.get(node)
            return process is None or process.poll() is not None

        def decided() -> bool:
            ended = bool(self._processes) and all(process.poll() is not None for process in self._processes)
            return len(self._joined()) >= self._settings.nodes or ended or any(map(gone, self._lost()))

        clock.wait_until(decided, self._settings.wait)
        present = self._joined()
        if len(present) < self._settings.nodes:
            for node in self._lost():
                if process := self._restarted.get(node):
                    # No later test waits for it.
                    kill_and_wait(process)
            names = ", ".join(node.name for node in present) or "none"
            again = ", and a new one does not join"
            lost = "".join(f"; {one.name}: {one.lost}{again * bool(self._restarted.get(one))}" for one in self._lost())
            assert self._listener is not None
            where = write_address(self._settings.listen[0], self._listener.port)
            hint = f"; {self._executor.hint.replace('HOST:PORT', where)}" if self._executor.hint else ""
            return f"{len(present)} of {self._settings.nodes} nodes are there ({names}){lost}{hint}"
        if self._alike == {*present}:
            return ""
        nodes = sorted(present, key=lambda node: node.name)
        first, compared = nodes[0].name, nodes[0].facts
        if self._settings.node:
            first = f"pytest on {socket.gethostname()}"
            device = "cpu" if self.accounts else self._settings.device
            compared = {**facts(self._settings.root, self._warmth.own, device), "wall": 0.0}
        found = [text for node in nodes for text in differences(node.name, node.facts, first, compared)]
        problem = "; ".join(found) or (self._unshared(nodes) if self._settings.shared else "")
        self._alike = set() if problem else {*present}
        return problem

    def _move(self) -> None:
        """Start the agent of the next node where the one that has all runs is lost: one that is preempted does not come back."""
        while self._spare and self._lost() and not self._joined():
            name = self._spare.pop(0)
            if process := self._executor.start_one(self._join, name, self._token):
                self._settings.say(f"{self._lost()[-1].name} is lost; {name} has the runs from now on")
                self._processes.append(process)
                self._await_agent(process)

    def _await_agent(self, process: subprocess.Popen[str]) -> None:
        clock.wait_until(lambda: bool(self._joined()) or process.poll() is not None, self._settings.wait)

    def _joined(self) -> list[Node]:
        return [node for node in list(self._nodes.values()) if node.facts and not node.lost]

    def _unshared(self, nodes: list[Node]) -> str:
        """Return which node has another directory in place of the shared one; empty if pytest sees what all write there."""
        shared = self._settings.shared
        # A node that can write below this new directory sees what pytest makes.
        directory = Path(shared, f"nodes-{uuid.uuid4().hex[:8]}")
        directory.mkdir(parents=True)
        files = {node: directory / str(number) for number, node in enumerate(nodes)}
        answers = _asked(nodes, lambda node: {"do": "write", "path": str(files[node])})
        found = [f"{node.name} cannot write in {shared} ({problem})" for node, problem in answers if problem]
        found += [
            f"pytest on {socket.gethostname()} does not see what {node.name} wrote in {shared}"
            for node, path in files.items()
            if not path.exists()
        ]
        shutil.rmtree(directory, ignore_errors=True)
        advice = (
            "suites, and tests with shared_dir, need a directory that all nodes share; expected --basetemp=DIR with one, "
            "or cells with option checkpoints='node', where the driver has it"
        )
        return f"{found[0]}: {advice}" if found else ""

    def _taken(self) -> str:
        """Find out, once nodes are lost, whether a scheduler takes all of them away."""
        if not self.taken and self._lost():
            self.taken = self._executor.taken()
        return self.taken

    def _lost(self) -> list[Node]:
        return [node for node in list(self._nodes.values()) if node.lost]

    def get_warm(self) -> str:
        """Wait until what runs on one node is ready; return what is wrong with it."""
        return self._one.get_warm()

    def run(self, request: Request, reuse: Reuse | None = None) -> Ending:
        """Run the request on its nodes."""
        if request.nodes == 1 and not self._settings.node and not request.payload.get("per_node"):
            return self._one.run(request, reuse)
        self._one.retire()
        if problem := self.ready():
            return Ending.not_launched(request.world_size, problem)
        nodes = sorted((node for node in self._nodes.values() if not node.lost), key=lambda node: node.name)
        nodes = nodes[: request.nodes]
        # Imports take seconds on each node, and the time limit begins with the ranks.
        answers = _asked(nodes, lambda _: {"do": "get_warm"})
        if cold := [f"{node.name}: {problem}" for node, problem in answers if problem]:
            return Ending.not_launched(request.world_size, "\n".join(cold))
        who, asked = current_item() or request.directory, clock.now()
        try:
            with self.devices(nodes, request.world_size // request.nodes, who) as given:
                got = clock.now()
                run = _Run(nodes, request.from_here(), self._environment, self._settings, self._taken, given)
                ending = run.run()
                if run.devices:
                    # One node that leases devices has noted them itself.
                    times = (asked, got, clock.now())
                    span = Span(run.devices, who, os.getpid(), *times, worker=self._settings.worker)
                    # The record is for reports only.
                    with contextlib.suppress(OSError):
                        append(Path(self._settings.timeline), span)
                return ending
        except UsageProblem as problem:
            return Ending.not_launched(request.world_size, str(problem))

    def devices(self, nodes: Sequence[Node], ranks: int, who: str) -> contextlib.AbstractContextManager[Given]:
        """Hold devices for so many ranks on each of these nodes, or on pytest's own, if the executor's scheduler counts them."""
        self._start()
        settings = self._settings
        names = [node.name for node in nodes] or [""]
        if settings.device == "cpu":
            # Ranks can share cores.
            asked = Asked(names, "CPU", 0, ranks, who)
        else:
            asked = Asked(names, "GPU", -(-ranks // settings.ranks_each), min(ranks, settings.gpus), who)

        def say(text: str) -> None:
            if lost := [f"{node.name}: {node.lost}" for node in nodes if node.lost]:
                raise UsageProblem("; ".join(lost))
            if text:
                settings.say(text)

        return self._executor.devices(asked, say)

    @property
    def reuse_scope(self) -> str:
        """The scope of the ranks that wait for a request; ranks of several nodes never do."""
        return self._one.reuse_scope

    def retire(self) -> str:
        """End the ranks that wait for a request."""
        return self._one.retire()

    def close(self) -> None:
        """End all node agents that were started, and let the others go."""
        for node in list(self._nodes.values()):
            node.send({"do": "close"})
        for process in self._processes:
            await_exit(process, 5.0)
            kill_and_wait(process)
            for pipe in filter(None, (process.stdin, process.stdout)):
                # A line may be left that it did not read.
                with contextlib.suppress(OSError):
                    pipe.close()
        if self._listener is not None:
            self._listener.close()
        for node in list(self._nodes.values()):
            node.channel.close()
        self._one.close()


def _asked(nodes: list[Node], message: Callable[[Node], Mapping[str, Any]]) -> list[tuple[Node, str]]:
    """Send each node a message, then wait for their answers: what is wrong, empty if nothing is."""
    for node in nodes:
        node.send(message(node))
    return [(node, node.problem()) for node in nodes]


@dataclasses.dataclass(eq=False)
class _Run:
    """One run on several nodes, or on one that leases its devices."""

    nodes: list[Node]
    request: Request
    environment: Mapping[str, str]
    settings: Settings
    taken: Callable[[], str]
    given: Given

    def __post_init__(self) -> None:
        self._directory = Path(self.request.directory)
        self._each = self.request.world_size // len(self.nodes)
        self._parts: dict[str, dict[str, Any]] = {}
        self._stopped_at: float | None = None
        self._counted_from: dict[Node, int] = {}
        #: The nodes that had stopped when it looked last, and when this process saw the first of them stop.
        self._still: list[Node] = []
        self._looked_at = self._still_since = clock.now()
        self._set = {name: value for name, value in os.environ.items() if self.environment.get(name) != value}
        self._unset = [name for name in self.environment if name not in os.environ]
        if not self.settings.node:
            # A node that leases devices says for which test.
            self._set.pop("PYTEST_CURRENT_TEST", None)

    def run(self) -> Ending:  # noqa: C901 - one loop over messages of all nodes
        """Start the parts, follow them to their ends, and conclude."""
        self.request.write()
        began = clock.now()
        if not self.settings.node:
            # A run that has to wait for its devices has its time limit from its first rank on.
            self._count()
        run_id = uuid.uuid4().hex
        store: list[Any] = [self.nodes[0].channel.peer, 0]
        failed_at: float | None = None
        waiting = list(enumerate(self.nodes))
        self._send(*waiting.pop(0), run_id, store)
        while len(self._parts) < len(self.nodes):
            heard = [message for node in self.nodes for message in self._heard(node)]
            for message in heard:
                if message["is"] == "log" and not self._counted_from:
                    self._count()
                elif message["is"] == "listens":
                    store = message["store"]
                    while waiting:
                        self._send(*waiting.pop(0), run_id, store)
            for node in self.nodes:
                if node.lost and node.name not in self._parts:
                    taken = self.taken()
                    why = f"{node.lost}: {taken}" if taken else node.lost
                    self._parts[node.name] = {"processes": {}, "known": {}, "lost": why, "output": {}}
            if waiting and self._parts:
                # Nobody opened the store.
                self._parts |= {node.name: _NOT_STARTED for _, node in waiting}
            if failed_at is None and any(map(_bad, self._parts.values())):
                failed_at = clock.now()
            self._stop(failed_at)
            if not heard:
                clock.sleep(0.005)
        return self._conclude(began)

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices that a scheduler gave the run on its nodes, as far as they have ended it."""
        return tuple(node.device(one) for node in self.nodes for one in self._parts[node.name].get("devices", ()))

    def _send(self, number: int, node: Node, run_id: str, store: list[Any]) -> None:
        place = {}
        if not self.settings.node:
            place = dataclasses.asdict(Place(number, len(self.nodes), node.channel.peer, (store[0], store[1]), run_id))
        request = dataclasses.asdict(self.request)
        changes = {"set": self._set, "unset": self._unset, "id": run_id[:8], "gpus": self.given.get(node.name, ())}
        node.send({"do": "run", "request": request, "place": place, **changes})

    def _heard(self, node: Node) -> list[dict[str, Any]]:
        """Return the messages of a node that have arrived, once its logs are written and forwarded."""
        found = []
        while not node.messages.empty():
            message = node.messages.get()
            found.append(message)
            if message["is"] == "log":
                self._log(node, message["rank"], message["lines"])
            elif message["is"] == "waits":
                self.settings.say(f"{node.name}: {message['text']}")
            elif message["is"] == "ended":
                self._parts[node.name] = message
                for span in message.get("spans", ()):
                    there = decode(Span, span).on_node(node.name, node.ahead, self.settings.worker)
                    append(Path(self.settings.timeline), there)
        return found

    def _log(self, node: Node, rank: int, lines: str) -> None:
        found = [_shifted(line, -node.ahead) for line in lines.splitlines()]
        with (self._directory / f"rank-{rank}.jsonl").open("a", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in found)
        forwarded = [_without_pid(line) for line in found if not _NOT_FORWARDED.match(line)]
        for other in self.nodes if forwarded else ():
            if other is not node:
                text = "".join(f"{_shifted(line, other.ahead)}\n" for line in forwarded)
                other.send({"do": "log", "rank": rank, "lines": text})

    def _count(self) -> None:
        """Begin the time limit. It is in beats of the nodes: where a job is suspended they have none, and no ranks run."""
        self._counted_from = {node: node.beats for node in self.nodes}

    def _stop(self, failed_at: float | None) -> None:
        """End the parts that outlive the failure of another one, or the time limit."""
        now = clock.now()
        running = [node for node in self.nodes if node.name not in self._parts]
        still = [node for node in running if now - min(self._looked_at, node.beat_at) > clock.GAP_S]
        if still and not self._still:
            names = ", ".join(node.name for node in still)
            self.settings.say(f"{names}: stopped, as in a suspended job, or very busy; time limits wait")
        if not self._still or now - self._looked_at > clock.GAP_S:
            self._still_since = now
        self._still, self._looked_at = still, now
        for node in still if now - self._still_since > SUSPENDED_S else ():
            node.lose(f"its agent has not run for {SUSPENDED_S / 60:g} minutes, though the node answers")
        limit = (self.request.timeout + AFTER_LIMIT_S) / HEARTBEAT_S
        over = self._counted_from and all(node.beats - self._counted_from[node] > limit for node in running)
        if self._stopped_at is None and ((failed_at and now > failed_at + AFTER_FAILURE_S) or over):
            self._stopped_at = now
            for node in running:
                node.send({"do": "stop", "why": "another node has ended"})
        elif self._stopped_at is not None and now > self._stopped_at + AFTER_LIMIT_S:
            for node in running:
                node.lose("did not end its ranks in time")

    def _conclude(self, began: float) -> Ending:
        processes: dict[int, RankProcess] = {}
        errors: list[str] = []
        events = LogReader(self._directory, range(self.request.world_size)).read()
        for number, node in enumerate(self.nodes):
            part = self._parts[node.name]
            ranks = range(number * self._each, (number + 1) * self._each)
            for rank in ranks:
                fields = part["processes"].get(str(rank), {"lost": part.get("lost", "")})
                process = RankProcess(**{**fields, "node": node.name})
                if process.ended_at is not None:
                    process = dataclasses.replace(process, ended_at=process.ended_at - node.ahead)
                elif process.lost:
                    process = dataclasses.replace(process, ended_at=node.lost_at)
                processes[rank] = process
            if "lost" in part:
                # A rank that had not finished says so itself.
                errors += [f"{node.name}: {part['lost']}"] * all(of_kind(Done, events[rank]) for rank in ranks)
            elif part["known"].get("launch_error"):
                errors.append(f"{node.name}: {part['known']['launch_error']}")
            self._write_output(part["output"])
            for name, text in part.get("recorded", {}).items():
                (self._directory / name).write_text(text, encoding="utf-8")
        parts = [(node, self._parts[node.name]["known"]) for node in self.nodes]
        known = {
            "timed_out": any(part.get("timed_out") for _, part in parts),
            "timeout": self.request.timeout,
            "ended_since": min(part.get("ended_since", math.inf) - node.ahead for node, part in parts),
            "oom_kills": max(part.get("oom_kills", 0) for _, part in parts),
            "first": next((part["first"] for _, part in parts if part.get("first") is not None), None),
            "left_over": tuple(f"{one} on {node.name}" for node, part in parts for one in part.get("left_over", ())),
            "notice": next((part["notice"] for _, part in parts if part.get("notice")), ""),
            "launch_error": "\n".join(errors),
            "seconds": clock.now() - began,
            "command": self.request.command(),
        }
        leaks = tuple(one for part in self._parts.values() for one in part.get("leaks", ()))
        return dataclasses.replace(conclude(events, processes, **known), leaks=leaks)

    def _write_output(self, output: Mapping[str, Mapping[str, str]]) -> None:
        """Write what the ranks of a node wrote to where reports look for it."""
        for rank, texts in output.items():
            for kind, text in texts.items():
                logs = self._directory / "logs" / "nodes" / "attempt_0" / rank
                path = self._directory / f"rank-{rank}.log" if kind == "log" else logs / f"{kind}.log"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")


_NOT_STARTED: dict[str, Any] = {"processes": {}, "known": {}, "output": {}}


def _bad(part: Mapping[str, Any]) -> bool:
    codes = [process["code"] for process in part["processes"].values()]
    return "lost" in part or not codes or any(codes) or bool(part["known"].get("launch_error"))


def _shifted(line: str, seconds: float) -> str:
    """Return the line of an event with its time by another node's clock."""
    return _TIME.sub(lambda found: f'"time": {float(found[1]) + seconds}', line, count=1) if seconds else line


def _without_pid(line: str) -> str:
    """Return the line without the number of its process, which means nothing on another node."""
    if line.startswith('{"event": "done"'):
        return json.dumps({**json.loads(line), "pid": None})
    return line
