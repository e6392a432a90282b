"""One run over several nodes, as pytest's process leads it: from the first message to the verdict.

A *run* is one process group from start to end. Its *ranks* are spread evenly over *nodes*
(machines): ranks 0 and 1 on ``n1``, 2 and 3 on ``n2``. On each node an *agent* (``agent``) starts
the ranks of its *part*. ``NodesLauncher`` (``launcher``) makes a ``NodesRun`` for a request and
calls ``run()``, which

1. sends the first node its part; that node opens a store at a free port, on which all nodes meet;
2. sends the other nodes their parts, with address and port of the store;
3. writes what ranks log to the run's directory on this machine, and forwards to the other nodes
   what their ranks, and the watchdog that each agent runs beside them, must know: a failure, say;
4. stops the other parts if one has failed or is lost, or if the time limit is over;
5. returns an ``Ending``: how each rank ended, as if all had been on one machine.

Machines have monotonic clocks of their own. Times that a node sends are changed to this machine's
clock by ``node.ahead``, which was measured when the node joined.

When a node has ended its part, it sends a ``Part`` (``parts``), a dict: ``processes`` (how each
rank's process ended), ``known`` (what its watchdog knows, as ``launch_error``), ``output`` of the
ranks, and perhaps ``spans``, ``devices``, ``leaks``, ``recorded``. For a node that is gone this
module makes a part with ``lost``, the reason.
"""

from __future__ import annotations

import dataclasses
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pytest_distcompat import clock
from pytest_distcompat.decode import decode
from pytest_distcompat.events import Done, of_kind
from pytest_distcompat.ext.cluster.executors import Given
from pytest_distcompat.ext.cluster.log_lines import is_forwarded, shifted, without_pid
from pytest_distcompat.ext.cluster.node import Node
from pytest_distcompat.ext.cluster.parts import (
    NOT_STARTED,
    Part,
    has_failed,
    known_of_run,
    process_of,
)
from pytest_distcompat.ext.cluster.place import Place
from pytest_distcompat.ext.cluster.settings import Settings
from pytest_distcompat.ext.cluster.time_limit import AFTER_LIMIT_S, TimeLimit
from pytest_distcompat.launch.forensics.conclude import RankProcess, conclude
from pytest_distcompat.launch.forensics.ending import Ending
from pytest_distcompat.launch.rank_log import LogReader
from pytest_distcompat.launch.request import Request
from pytest_distcompat.lease.timeline import Span, append

#: How long the other nodes may go on after one has ended badly, in seconds.
AFTER_FAILURE_S = 2.0


@dataclasses.dataclass(eq=False)
class NodesRun:
    """One run on several nodes, or on one that leases its devices.

    Attributes:
        nodes: The nodes; the first has the lowest ranks and opens the store.
        request: What is run.
        environment: The environment of this process when the session began; nodes are sent what has
            changed since.
        settings: The nodes of the session. If ``settings.node`` is set, one node has all runs and
            leases its devices itself.
        taken: Returns why a scheduler takes all nodes away; empty if it does not.
        given: The GPUs that a scheduler gave the run, by the name of the node: ``{"n1": ["0"]}``.
    """

    nodes: list[Node]
    request: Request
    environment: Mapping[str, str]
    settings: Settings
    taken: Callable[[], str]
    given: Given

    def __post_init__(self) -> None:
        self._directory = Path(self.request.directory)
        #: By the name of each node that has ended its part of the run: how it ended.
        self._parts: dict[str, Part] = {}
        #: When a part failed, and when the others were told to stop; None until then.
        self._failed_at: float | None = None
        self._stopped_at: float | None = None
        self._limit = TimeLimit(self.nodes, self.request.timeout, self.settings.say)
        #: The variables of the environment that tests have set, and those that they have removed.
        self._set: dict[str, str] = {}
        for name, value in os.environ.items():
            if self.environment.get(name) != value:
                self._set[name] = value
        self._unset = [name for name in self.environment if name not in os.environ]
        if not self.settings.node:
            # Only a node that leases devices reads it: its leases name the test that has them.
            self._set.pop("PYTEST_CURRENT_TEST", None)

    def run(self) -> Ending:
        """Start the parts, follow them to their ends, and conclude."""
        self.request.write()
        began = clock.now()
        if not self.settings.node:
            # A node that leases its devices may wait for them first: there the limit begins with
            # the first line of a rank's log.
            self._limit.begin()
        run_id = uuid.uuid4().hex
        # The first node's own address, as this process sees it. Port 0: the node opens the store at
        # a free port, and says which in a message ``listens``.
        own_address = self.nodes[0].channel.peer
        self._send(0, run_id, (own_address, 0))
        all_started = len(self.nodes) == 1
        while len(self._parts) < len(self.nodes):
            messages = self._receive()
            for message in messages:
                if message["is"] == "log":
                    self._limit.begin()
                elif message["is"] == "listens" and not all_started:
                    self._start_others(run_id, message["store"])
                    all_started = True
            self._note_lost()
            if not all_started and self._parts:
                # The first node has ended and has not opened the store, so the others never start.
                for node in self.nodes[1:]:
                    self._parts[node.name] = NOT_STARTED
            if self._failed_at is None and any(map(has_failed, self._parts.values())):
                self._failed_at = clock.now()
            self._stop_late()
            if not messages:
                # Nothing has come: do not keep a core busy.
                clock.sleep(0.005)
        return self._conclude(began)

    def _start_others(self, run_id: str, store: Sequence[Any]) -> None:
        """Start the parts of all nodes but the first, which has opened the store.

        ``store`` is its address and port, as the message ``listens`` has them.
        """
        host, port = store
        for number in range(1, len(self.nodes)):
            self._send(number, run_id, (host, port))

    def _note_lost(self) -> None:
        """Let the parts of nodes that are gone count as ended, with the reason."""
        for node in self.nodes:
            if node.lost and node.name not in self._parts:
                taken = self.taken()
                why = f"{node.lost}: {taken}" if taken else node.lost
                lost: Part = {"processes": {}, "known": {}, "lost": why, "output": {}}
                self._parts[node.name] = lost

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices that a scheduler gave the run, such as ``("n1 GPU-8a2f", ...)``.

        Read it after ``run``. A node that was lost has not said which devices it had.
        """
        names = []
        for node in self.nodes:
            for device in self._parts[node.name].get("devices", ()):
                names.append(node.device(device))
        return tuple(names)

    def _send(self, number: int, run_id: str, store: tuple[str, int]) -> None:
        """Start the part of the ``number``-th node; the nodes meet on ``store``, host and port."""
        node = self.nodes[number]
        # Which part of the run the node has. Empty where one node has the whole run.
        place = {}
        if not self.settings.node:
            place = dataclasses.asdict(Place(number, node.channel.peer, store, run_id))
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
        """Return the messages of all nodes that have arrived.

        ``_take_in`` has done by then what each asks for.
        """
        messages = []
        for node in self.nodes:
            while not node.messages.empty():
                message = node.messages.get()
                messages.append(message)
                self._take_in(node, message)
        return messages

    def _take_in(self, node: Node, message: dict[str, Any]) -> None:
        """Do what a node's message asks for.

        ``log``: write lines of a rank's log. ``waits``: show the user what the node waits for.
        ``ended``: keep how the part ended, and record its leases of devices (spans of time in which
        a run had them) in the session's timeline.
        """
        if message["is"] == "log":
            self._log(node, message["rank"], message["lines"])
        elif message["is"] == "waits":
            self.settings.say(f"{node.name}: {message['text']}")
        elif message["is"] == "ended":
            self._parts[node.name] = message
            worker = self.settings.worker
            for fields in message.get("spans", ()):
                span = decode(Span, fields).on_node(node.name, node.ahead, worker)
                append(Path(self.settings.timeline), span)

    def _log(self, node: Node, rank: int, lines: str) -> None:
        """Write lines of a rank's log, and forward to other nodes what they need.

        Their times are changed to those by the clock of this machine, and for each other node to
        those by its clock.
        """
        own_lines = [shifted(line, -node.ahead) for line in lines.splitlines()]
        path = self._directory / f"rank-{rank}.jsonl"
        with path.open("a", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in own_lines)
        forwarded = [without_pid(line) for line in own_lines if is_forwarded(line)]
        if not forwarded:
            return
        for other in self.nodes:
            if other is not node:
                text = ""
                for line in forwarded:
                    text += f"{shifted(line, other.ahead)}\n"
                other.send({"do": "log", "rank": rank, "lines": text})

    def _stop_late(self) -> None:
        """End the parts that outlive the failure of another one, or the time limit.

        First their agents are told to stop them. A node that has not done so after
        ``AFTER_LIMIT_S`` counts as lost.
        """
        now = clock.now()
        running = [node for node in self.nodes if node.name not in self._parts]
        # A scheduler may stop a job for a while; the limit waits, and the user is told.
        self._limit.note_suspended(running, now)
        if self._stopped_at is not None:
            if now > self._stopped_at + AFTER_LIMIT_S:
                for node in running:
                    node.lose("did not end its ranks in time")
            return
        outlives_failure = self._failed_at is not None and now > self._failed_at + AFTER_FAILURE_S
        if outlives_failure or self._limit.is_over(running):
            self._stopped_at = now
            for node in running:
                node.send({"do": "stop", "why": "another node has ended"})

    def _conclude(self, began: float) -> Ending:
        """Return how the run ended.

        It is concluded from the logs of all ranks, and what each node knew of its processes.
        """
        processes: dict[int, RankProcess] = {}
        errors: list[str] = []
        events = LogReader(self._directory, range(self.request.world_size)).read()
        for number, node in enumerate(self.nodes):
            part = self._parts[node.name]
            ranks = self.request.spread.ranks_on(number)
            for rank in ranks:
                processes[rank] = process_of(rank, node, part)
            if "lost" in part:
                # The report says of each unfinished rank that its node was lost. If all ranks had
                # finished, only this error says it.
                if all(of_kind(Done, events[rank]) for rank in ranks):
                    errors.append(f"{node.name}: {part['lost']}")
            else:
                launch_error = part["known"].get("launch_error")
                if launch_error:
                    errors.append(f"{node.name}: {launch_error}")
            self._write_output(part["output"])
            # Files of extensions that record on each rank, such as ``ext.reach``.
            for name, text in part.get("recorded", {}).items():
                (self._directory / name).write_text(text, encoding="utf-8")
        ending = conclude(
            events,
            processes,
            # ``timed_out``, ``first`` (the rank that failed first) and the like, of all nodes.
            **known_of_run(self.nodes, self._parts, self.request.timeout),
            launch_error="\n".join(errors),
            seconds=clock.now() - began,
            command=_command(self.request),
        )
        leaks: list[str] = []
        for part in self._parts.values():
            leaks += part.get("leaks", ())
        return dataclasses.replace(ending, leaks=tuple(leaks))

    def _write_output(self, output: Mapping[str, Mapping[str, str]]) -> None:
        """Write what the ranks of a node printed to the files where reports look for it.

        Args:
            output: Rank -> ``stdout``, ``stderr`` and ``log`` -> text.
        """
        for rank, texts in output.items():
            for kind, text in texts.items():
                path = self._directory / f"rank-{rank}.log"
                if kind != "log":
                    logs = self._directory / "logs" / "nodes" / "attempt_0" / rank
                    path = logs / f"{kind}.log"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")


def _command(request: Request) -> str:
    """Return the command line that runs the run alone.

    If the run is on several nodes, it has what torchrun needs on each.
    """
    if request.spread.on_one:
        return request.command()
    meeting = f"--nnodes {request.nodes} --rdzv-backend c10d --rdzv-endpoint HOST:29400"
    return f"{request.command(meeting)}  # on each node"
