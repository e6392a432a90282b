"""Fork servers, the processes from which warm ranks are forked.

They are multiprocessing's own fork servers, but several of them. ``server`` starts them in the
launcher process, by ``ForkServers``, and calls ``choose`` before each run: it says from which
servers multiprocessing forks the next ranks.

There are two interpreters, called *sides*, because ranks of torchrun differ: each is started by
itself, with its own hash seed and its own layout of memory. Forks of one process would be alike.
Code that depends on the order of a set of strings then works on forks and fails under torchrun.
So ranks come from the two sides in turn, and the next run begins with the other side: the run that
loads a checkpoint differs from the one that saved it.

With 4, 8 or 12 ranks, and so on, the sides do not strictly take turns. Such ranks may form a mesh
of 2 x 2 or 2 x 4, and ranks 0 and 2, neighbours along one of its dimensions, would be alike. So two
ranks whose numbers differ in one binary digit come from different sides.

Each side has a server that has imported libraries. Where tests are collected beforehand, it has
another server, forked from the first, that has imported the user's modules too. Then the four
servers are ``libraries-0``, ``libraries-1``, ``session-0`` and ``session-1``. The servers of side 0
are forked from the launcher process (``ForkServers.fork``); those of side 1 are a new interpreter
(``ForkServers.spawn``).
"""

from __future__ import annotations

import itertools
import json
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from pytest_distcompat.launch import unimported

#: From how many interpreters ranks are forked in turn. With a third one more ranks would differ,
#: but each needs memory of its own.
SIDES = 2
#: The kinds of fork servers, by what they have imported: libraries, or the user's modules too, with
#: the tests collected from them.
LIBRARIES, SESSION = "libraries", "session"
#: The log file of each side's servers; the launcher process writes to the first one too.
LOGS = ("server.log", "other.log")


class Ends(NamedTuple):
    """A fork server's own ends of a socket and two pipes, as file descriptors.

    Attributes:
        listener: The socket on which it gets a request for each rank to fork.
        alive: A pipe from the launcher process. The server ends when its other end is closed.
        ready: A pipe to the launcher process. The server writes its status there, a line of JSON.
    """

    listener: int
    alive: int
    ready: int

    def close(self) -> None:
        """Close them, in a process that has handed them to another one."""
        for descriptor in self:
            os.close(descriptor)


class ForkServer:
    """A fork server as the launcher process sees it: the other ends of its socket and pipes.

    Args:
        name: Its kind and side: ``session-1``.
    """

    def __init__(self, name: str) -> None:
        self.address = str(Path(multiprocessing.util.get_temp_dir()) / name)
        alive, self.alive = os.pipe()
        self._ready, ready = os.pipe()
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self.address)
            listener.listen()
            self.ends = Ends(listener.detach(), alive, ready)

    def status(self) -> dict[str, Any] | None:
        """Wait until it serves, and return its status; None if it died before."""
        # Only one line is read, not all until the end: a process that the server has forked
        # meanwhile may keep the other end open.
        with os.fdopen(self._ready, encoding="utf-8") as ready:
            line = ready.readline()
        return json.loads(line) if line else None

    def forget(self) -> None:
        """Close these ends, in a fork of the launcher process that becomes a fork server itself."""
        os.close(self.alive)
        os.close(self._ready)


class ForkServers:
    """All fork servers of the launcher process: of each kind, one for each side.

    Args:
        kinds: ``LIBRARIES``, and ``SESSION`` if tests are collected beforehand.
    """

    def __init__(self, kinds: Sequence[str]) -> None:
        # Ranks inherit its descriptor.
        multiprocessing.resource_tracker.ensure_running()
        self._servers: dict[str, list[ForkServer]] = {}
        for kind in kinds:
            self._servers[kind] = [ForkServer(f"{kind}-{side}") for side in range(SIDES)]
        #: How many runs there were.
        self._runs = 0
        #: The processes that this object started, the libraries servers. The session servers are
        #: their children.
        self.pids: list[int] = []

    def ends(self, side: int) -> dict[str, Ends]:
        """Return the ends of the servers of one side, by kind."""
        return {kind: servers[side].ends for kind, servers in self._servers.items()}

    def fork(self, side: int, serve: Callable[[Mapping[str, Ends]], NoReturn]) -> None:
        """Fork the servers of that side from this process, which must have one thread.

        Args:
            side: 0 or 1.
            serve: Called in the fork with its ends, by kind. It does not return.
        """
        pid = os.fork()
        if pid == 0:
            for servers in self._servers.values():
                for server in servers:
                    server.forget()
            serve(self.ends(side))
        self.pids.append(pid)
        self._close_ends(side)

    def spawn(self, side: int, line: Sequence[str], log: Path) -> None:
        """Start the servers of that side as another interpreter.

        Args:
            side: 0 or 1.
            line: The command. It gets the ends as a further argument, as JSON.
            log: The file for their output. It is not that of the other side: two servers that hang
                at once would write their stacks into each other's.
        """
        ends = self.ends(side)
        command = [*line, json.dumps(ends)]
        descriptors: list[int] = []
        for ends_of_server in ends.values():
            descriptors += ends_of_server
        # Popen must live as long as this object, although its exit code is never read.
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                command, pass_fds=descriptors, stdout=file, stderr=file
            )
        self.pids.append(self._process.pid)
        self._close_ends(side)

    def _close_ends(self, side: int) -> None:
        """Close the servers' own ends in this process, which has handed them on.

        If this process kept the end of ``ready`` open, it could not see that a server died.
        """
        for ends in self.ends(side).values():
            ends.close()

    def wait_until_serving(self) -> list[dict[str, dict[str, Any] | None]]:
        """Wait until all serve, and return for each side, by kind, the status (None if it died)."""
        statuses = []
        for side in range(SIDES):
            statuses.append(
                {kind: servers[side].status() for kind, servers in self._servers.items()}
            )
        return statuses

    def choose(self, kind: str, turn: int | None, world_size: int) -> None:
        """Have multiprocessing fork the next ranks from servers of that kind, rank 0 first.

        Private names used here: ``connect_to_new_process`` of ``multiprocessing.forkserver``, which
        ``popen_forkserver`` looks up at each call, and three attributes of its fork server.
        ``tests/launch/test_private_names.py`` fails when they move. Python 3.14 requires a key of
        those that connect, except with a server that was started without one, as these are; their
        sockets lie in a directory that only the user can enter.

        Args:
            kind: ``LIBRARIES`` or ``SESSION``.
            turn: The number of the run in a chain of runs, each of which loads the checkpoint of
                the one before. If it is even, rank 0 comes from side 0, else from side 1. None: the
                number of all runs before takes its place.
            world_size: The number of ranks that will be forked.
        """
        servers = self._servers[kind]
        first = self._runs if turn is None else turn
        self._runs += 1
        started = itertools.count()
        module: Any = multiprocessing.forkserver
        forkserver_state = module._forkserver  # noqa: SLF001 - see the docstring

        # multiprocessing calls this function once for each rank that it starts.
        def connect(descriptors: Sequence[int]) -> Any:
            rank = next(started)
            server = servers[(first + _step(rank, world_size)) % SIDES]
            forkserver_state._forkserver_address = server.address  # noqa: SLF001
            forkserver_state._forkserver_alive_fd = server.alive  # noqa: SLF001
            return type(forkserver_state).connect_to_new_process(forkserver_state, descriptors)

        # multiprocessing would start a server of its own if it knew of no child that is one.
        forkserver_state._forkserver_pid = self.pids[0]  # noqa: SLF001
        module.connect_to_new_process = connect

    def dismiss(self) -> None:
        """Have all servers end once the ranks that they forked have ended."""
        for servers in self._servers.values():
            for server in servers:
                os.close(server.alive)


def _step(rank: int, world_size: int) -> int:
    """Return by how many sides a rank is after rank 0: an even number means the same side.

    If 4 divides the number of ranks, it is the number of ones among the binary digits (see the
    module's docstring): 0, 1, 1, 2 for ranks 0 to 3. Otherwise the sides take turns.
    """
    if world_size % 4 == 0:
        return rank.bit_count()
    return rank


def serve(
    ends: Ends, status: Mapping[str, Any], at_end: Callable[[], None] = lambda: None
) -> NoReturn:
    """Be a fork server: write the status, and fork ranks on request until the other end closes.

    Args:
        ends: This server's ends.
        status: What ``preload`` returned about its imports, for the launcher process.
        at_end: Called when no process is left that could ask for a rank.
    """
    code = 1
    # To a rank a library looks as if it was not imported, until the rank imports it (see
    # ``unimported``). Only libraries that the collected tests have imported stay visible.
    unimported.keep_visible()
    try:
        with os.fdopen(ends.ready, "w", encoding="utf-8") as file:
            file.write(f"{json.dumps(status)}\n")
        multiprocessing.forkserver.main(ends.listener, ends.alive, [])
    except SystemExit:
        # No process is left that could ask for a rank.
        code = 0
        at_end()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)
