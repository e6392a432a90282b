"""The nodes of a session: their agents are started, join, are lost, and are started again.

A *node* is a machine on which ranks run. On each an *agent* (``agent``) joins pytest's process and
starts ranks there. ``NodesLauncher`` (``launcher``) has one ``Membership``. It calls ``start()``
when the session begins, ``ready()`` before each run over nodes, and ``present(2)`` for the nodes of
the run.

What starts the agents is the *executor*: on this machine, by Slurm, on a Ray cluster, or the user
by hand. Each agent connects to a ``Listener`` here, proves that it knows the session's token, gets
a welcome (``_greet``) and sends facts such as its versions and files, which must be alike on all
nodes (``alike``). A node whose agent or machine is gone is *lost* from then on.

A scheduler may also take all nodes away, as when the job's time is over; the executor knows whether
it does (``Executor.taken``).

A run may span several nodes. With ``--distcompat-worker-nodes`` one node has all runs of this
process instead (``Settings.node``), and others are spare: they take over in turn where it is lost.
"""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from pytest_distcompat import clock
from pytest_distcompat.ext.cluster.alike import difference
from pytest_distcompat.ext.cluster.channel import Channel, Listener, NotProvedError
from pytest_distcompat.ext.cluster.executors import Executor
from pytest_distcompat.ext.cluster.node import Node
from pytest_distcompat.ext.cluster.settings import Settings
from pytest_distcompat.launch.process import await_exit, kill_and_wait
from pytest_distcompat.launch.request import Warmth
from pytest_distcompat.lease.pool import boot_id
from pytest_distcompat.user_input import write_address


class Membership:
    """The nodes of a session, and which of them are there.

    Args:
        executor: How agents are started.
        settings: How many nodes there are, where they join, and so on.
        warmth: What their launcher processes import in advance.
        session: A description of the session for the ranks, as JSON.
    """

    def __init__(
        self, executor: Executor, settings: Settings, warmth: Warmth, session: str
    ) -> None:
        self._executor = executor
        self._settings = settings
        self._warmth = warmth
        self._session = session
        #: Name -> the node that joined last under that name, lost or not.
        self._nodes: dict[str, Node] = {}
        #: Nodes join in several threads at once. With this lock a name is taken once.
        self._admitting = threading.Lock()
        #: Accepts agents; None until ``start``.
        self._listener: Listener | None = None
        #: The processes by which the executor started agents: the agents themselves, or ``srun``.
        self._processes: list[subprocess.Popen[str]] = []
        self._token = settings.token or secrets.token_hex(32)
        #: The agents that were started again, by the node that was lost; None for one that a user
        #: has to start.
        self._restarted: dict[Node, subprocess.Popen[str] | None] = {}
        #: The nodes that take over in turn, where one node has all runs (``Settings.node``).
        self._spare = list(settings.spare)
        #: The nodes that have been compared and are alike.
        self._alike: set[Node] = set()
        #: Whether the executor's scheduler counts devices.
        self._accounts = executor.accounts
        #: Why a scheduler takes all nodes away, so that no later run can start; empty while it does
        #: not.
        self.taken = ""

    def present(self, count: int) -> list[Node]:
        """Return the first so many nodes that are not lost, by name."""
        present = [node for node in self._nodes.values() if not node.lost]
        return sorted(present, key=lambda node: node.name)[:count]

    def start(self) -> None:
        """Listen for node agents, and have the executor start its own, once."""
        if self._listener is not None:
            return
        host, port = self._settings.listen
        self._listener = Listener(host, port, self._token.encode(), self._admit)
        address = write_address(host, self._listener.port)
        # The command of an agent. It reads the token from its standard input.
        self._join = [sys.executable, "-m", "pytest_distcompat.cli", "join", address]
        self._join += ["--token-file", "-", "--with-parent"]
        if self._settings.node:
            process = self._executor.start_one(self._join, self._settings.node, self._token)
            self._processes = [process] if process is not None else []
        else:
            self._processes = self._executor.start(self._join, self._settings.nodes, self._token)

    def _admit(self, channel: Channel) -> None:
        """Take in a peer that knows the token, or tell it why not.

        The listener calls this in a thread of its own, which then receives what the node sends
        until the node is gone.
        """
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
        # The wall clock: from now on how far it is ahead of this machine's. Nodes may join minutes
        # apart, so their times themselves could not be compared.
        node_facts["wall"] -= clock.wall()
        if node.boot != boot_id():
            # Another machine, whose monotonic clock counts from another time.
            node.measure_clock()
        # Its launcher process begins to import what ``warmth`` names; nobody waits for it.
        node.send({"do": "warm", "session": self._session})
        if self._accounts:
            # The scheduler says for each run whether a node has enough GPUs. Numbers that differ
            # are no difference between nodes then.
            node_facts["gpus"] = 0
        # A node with facts has joined.
        node.facts = node_facts

    def _refusal_reason(self, node: Node) -> str:
        """Return why a node cannot join; empty if it can."""
        known = self._nodes.get(node.name)
        if known is not None and not known.lost:
            peer = known.channel.peer
            return f"a node of that name has joined from {peer} already; expected another --name"
        present = [other.name for other in self._nodes.values() if not other.lost]
        if len(present) >= self._settings.nodes:
            return f"all {len(present)} nodes have joined: {', '.join(present)}"
        return ""

    def ready(self) -> str:
        """Wait until all nodes have joined and are alike.

        Agents that were lost since are started again, by an executor that can.

        Returns:
            What is wrong; empty if nothing is.
        """
        self.start()
        # If the scheduler takes the job away, waiting is no use.
        taken = self.find_taken()
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
        problem = difference(
            sorted(present, key=lambda node: node.name),
            self._settings,
            self._warmth,
            accounts=self._accounts,
        )
        self._alike = set() if problem else {*present}
        return problem

    def _restart_lost(self) -> None:
        """Have agents started again that were lost since they had joined, each once.

        One that has never joined would not join the second time either.
        """
        if self._settings.node:
            # Where one node has all runs, ``_move`` takes the next one.
            return
        for node in self._lost():
            if node.facts and node not in self._restarted:
                process = self._executor.restart(self._join, node.name, self._token)
                self._restarted[node] = process
                if process is not None:
                    self._processes.append(process)

    def _all_joined_or_never_will(self) -> bool:
        """Tell whether there is nothing left to wait for.

        All nodes have joined then, or one that is missing will not come: what the executor started
        has ended, or a lost node is not started again.
        """
        if len(self._joined()) >= self._settings.nodes:
            return True
        if self._processes and self._all_processes_have_ended():
            return True
        for node in self._lost():
            process = self._restarted.get(node)
            if process is None or process.poll() is not None:
                return True
        return False

    def _all_processes_have_ended(self) -> bool:
        """Tell whether all processes that the executor started have ended."""
        return all(process.poll() is not None for process in self._processes)

    def _describe_missing(self, present: Sequence[Node]) -> str:
        """Return which nodes have joined, what became of those lost, and how a node can join."""
        names = ", ".join(node.name for node in present) or "none"
        count = f"{len(present)} of {self._settings.nodes} nodes"
        text = f"{count} are there ({names})"
        for node in self._lost():
            text += f"; {node.name}: {node.lost}"
            if self._restarted.get(node):
                text += ", and a new one does not join"
        if self._executor.hint:
            assert self._listener is not None
            address = write_address(self._settings.listen[0], self._listener.port)
            text += f"; {self._executor.hint.replace('HOST:PORT', address)}"
        return text

    def _move(self) -> None:
        """Start the agent of the next spare node if the node that has all runs is lost.

        That is so with ``--distcompat-worker-nodes``. The lost node itself may have been preempted,
        and does not come back.
        """
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
        """Wait until a node has joined, or the process that starts its agent has ended."""

        def joined_or_ended() -> bool:
            return bool(self._joined()) or process.poll() is not None

        clock.wait_until(joined_or_ended, self._settings.wait)

    def _joined(self) -> list[Node]:
        """Return the nodes that have joined and are not lost."""
        joined = []
        # A copy: nodes join in another thread.
        for node in list(self._nodes.values()):
            if node.facts and not node.lost:
                joined.append(node)
        return joined

    def find_taken(self) -> str:
        """Return why a scheduler takes all nodes away, empty if it does not.

        It is asked only once a node is lost, because the answer may take seconds.
        """
        if not self.taken and self._lost():
            self.taken = self._executor.taken()
        return self.taken

    def _lost(self) -> list[Node]:
        """Return the nodes that are lost."""
        return [node for node in list(self._nodes.values()) if node.lost]

    def close(self) -> None:
        """End all node agents that were started, and let the others go."""
        for node in list(self._nodes.values()):
            node.send({"do": "close"})
        for process in self._processes:
            await_exit(process, 5.0)
            kill_and_wait(process)
            for pipe in (process.stdin, process.stdout):
                # Closing flushes; a line that the process did not read cannot be written any more.
                with contextlib.suppress(OSError):
                    if pipe is not None:
                        pipe.close()
        if self._listener is not None:
            self._listener.close()
        for node in list(self._nodes.values()):
            node.channel.close()
