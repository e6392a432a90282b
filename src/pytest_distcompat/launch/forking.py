"""Fork servers from which warm ranks are started.

They are multiprocessing's own, several of them, started our way. Ranks of torchrun are processes
that were started one by one: each has its own hash seed and its own layout of memory. So there are
two interpreters (``SIDES``) from which ranks come in turn, and the next run starts with the other
one. What goes by the order of a set of strings then differs between the ranks of a group, and
between the run that saves and the one that loads. Of 4 or 8 ranks those come from different
interpreters whose numbers differ in one binary digit: they are neighbours along a dimension of a
mesh of 2 x 2 or 2 x 4, and would agree along one of the dimensions if they came strictly in turn.

Each interpreter has a server that has imported libraries. Where tests are collected beforehand,
another server, forked from the first, has imported the user's modules too.
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

#: From how many interpreters ranks are forked in turn. A third would make ranks 0 and 2 differ too,
#: but needs memory of its own.
SIDES = 2
#: What a fork server has imported: libraries, or the user's modules too, with the tests collected
#: from them.
LIBRARIES, SESSION = "libraries", "session"
#: Their log files, by side; the launcher process writes to the first one too.
LOGS = ("server.log", "other.log")


class Ends(NamedTuple):
    """A fork server's ends of its sockets and pipes, as file descriptors.

    It listens on ``listener``, ends when the other end of ``alive`` is closed, and writes its
    status to ``ready``.
    """

    listener: int
    alive: int
    ready: int

    def close(self) -> None:
        """Close them, in a process that has handed them to another one."""
        for descriptor in self:
            os.close(descriptor)


class ForkServer:
    """The other ends of a fork server, for the process that has ranks forked from it."""

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
        # One line, not the whole: a process that it forked meanwhile may have the other end open.
        with os.fdopen(self._ready, encoding="utf-8") as ready:
            line = ready.readline()
        return json.loads(line) if line else None

    def forget(self) -> None:
        """Close these ends, in a process that becomes a fork server itself."""
        os.close(self.alive)
        os.close(self._ready)


class ForkServers:
    """All fork servers of this process: by kind, one for each side."""

    def __init__(self, kinds: Sequence[str]) -> None:
        # Ranks inherit its descriptor.
        multiprocessing.resource_tracker.ensure_running()
        self._servers: dict[str, list[ForkServer]] = {}
        for kind in kinds:
            self._servers[kind] = [ForkServer(f"{kind}-{side}") for side in range(SIDES)]
        self._runs = 0
        #: The processes that were started here; the session servers are their children.
        self.pids: list[int] = []

    def ends(self, side: int) -> dict[str, Ends]:
        """Return the ends of the servers of one side, by kind."""
        return {kind: servers[side].ends for kind, servers in self._servers.items()}

    def fork(self, side: int, serve: Callable[[Mapping[str, Ends]], NoReturn]) -> None:
        """Fork the servers of that side from this process, which must have one thread."""
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

        The command of ``line`` gets the ends as JSON. Their output goes to ``log``, a file of their
        own: two that hang at once would write their stacks into each other's.
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
        """Close the servers' ends here.

        No other process may have the end whose closing means that a server died.
        """
        for ends in self.ends(side).values():
            ends.close()

    def wait_until_serving(self) -> list[dict[str, dict[str, Any] | None]]:
        """Wait until all serve, and return by side and kind their statuses."""
        statuses = []
        for side in range(SIDES):
            statuses.append(
                {kind: servers[side].status() for kind, servers in self._servers.items()}
            )
        return statuses

    def choose(self, kind: str, turn: int | None, world_size: int) -> None:
        """Have multiprocessing fork ranks from servers of that kind from now on, rank 0 first.

        Private names used here: ``connect_to_new_process`` of ``multiprocessing.forkserver``, which
        ``popen_forkserver`` looks up at each call, and three attributes of its fork server.
        ``tests/launch/test_private_names.py`` fails when they move. Python 3.14 requires a key of
        those that connect, except with a server that was started without one, as these are; their
        sockets lie in a directory that only the user can enter.

        The parity of ``turn`` says from which side rank 0 comes; None: from another one each time.
        """
        servers = self._servers[kind]
        first = self._runs if turn is None else turn
        self._runs += 1
        started = itertools.count()
        module: Any = multiprocessing.forkserver
        forkserver_state = module._forkserver  # noqa: SLF001 - see the docstring

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
    """Return by how many sides a rank is after rank 0.

    Where ranks may form a mesh it follows from its binary digits, else they take turns.
    """
    if world_size % 4 == 0:
        return rank.bit_count()
    return rank


def serve(
    ends: Ends, status: Mapping[str, Any], at_end: Callable[[], None] = lambda: None
) -> NoReturn:
    """Write this process's status, and fork ranks on request.

    That ends when no other process can ask; then ``at_end`` is called.
    """
    code = 1
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
