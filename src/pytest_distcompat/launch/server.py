"""The launcher process: one beside each pytest process, in which torchrun's agent starts the ranks.

pytest's process, the *parent*, starts it (``launcher_process``), and so need not import torch
itself. ``main`` is its main function. Messages are lines of JSON on a socket:

- at first it sends its status: ``{"unfit": "", "not_shared": "", "findings": [], "leaves": true}``.
  ``unfit`` says why no rank may be forked from these servers, ``not_shared`` why none may be forked
  from those that have collected the tests; ``findings`` has what the user's modules did at import
  that ranks must do themselves, and ``leaves`` whether exit functions are called at the end;
- for each run it reads ``{"request": ".../request.json", "start": "session"}``, and when the
  run is over it sends ``{"exit_codes": [0, 0], "first": null, "ended_at": [12.3, 12.3]}``.

It starts fork servers, processes from which ranks are forked (``forking``). There are two sides,
each an interpreter of its own. Each side has a server that has imported libraries. In a session
with marked tests it also has a *session* server, a fork of the first one that has collected the
user's tests. The first side is forked from this process, the second is started by a command.
"""

from __future__ import annotations

import json
import multiprocessing.util
import os
import signal
import socket
import sys
import tempfile
import traceback
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from pytest_distcompat import clock
from pytest_distcompat.launch import preload, rank, unimported
from pytest_distcompat.launch.forking import LIBRARIES, LOGS, SESSION, Ends, ForkServers, serve
from pytest_distcompat.launch.process import (
    adopt_orphans,
    alive,
    children,
    die_with_parent,
    reap_adopted,
)
from pytest_distcompat.launch.request import Request, in_new_process

#: How long fork servers may take to run their exit functions, in seconds.
SERVERS_END_TIMEOUT_S = 3.0
#: The message about a fork server that ended before it served.
_DIED = "it died while it imported"


def main(channel_descriptor: str, warmth: str) -> None:
    """Serve until the other end of the socket closes.

    Args:
        channel_descriptor: The file descriptor of the socket, as text.
        warmth: The path of a JSON file with the fields of a ``Warmth`` (what the fork servers
            import and collect) and the ``device``.
    """
    # What a dead rank leaves running becomes a child of this process, and can be found and killed.
    adopt_orphans()
    _handle_by_default()
    descriptor = int(channel_descriptor)
    # multiprocessing puts the fork servers' sockets there: into the parent's directory, which is
    # removed with the parent, and whose path is short enough. This process may be killed at any
    # moment, and could not remove a directory of its own.
    tempfile.tempdir = str(Path(warmth).parent)
    multiprocessing.util.get_temp_dir()
    tempfile.tempdir = None
    servers, status = _start_fork_servers(warmth, descriptor)
    own_children = children(os.getpid())
    channel = socket.socket(fileno=descriptor)
    os.set_inheritable(descriptor, False)
    lines = channel.makefile("r", encoding="utf-8")
    channel.sendall(f"{json.dumps(status)}\n".encode())
    for line in lines:
        # Before a run, not after the last one: the parent kills what a run left only once it has
        # the answer.
        reap_adopted(keep=own_children)
        outcome = _perform(line, servers, channel)
        channel.sendall(f"{json.dumps(outcome)}\n".encode())
    servers.dismiss()
    clock.wait_until(
        lambda: not any(alive(pid) for pid in servers.pids), SERVERS_END_TIMEOUT_S, every=0.01
    )


def _perform(line: str, servers: ForkServers, channel: socket.socket) -> dict[str, Any]:
    """Run one request under torchrun's agent, and return the answer for the parent.

    Args:
        line: The message: the ``request``, which is the path of its file, and how the ranks
            ``start``: ``spawn``, or the kind of fork server from which they are forked.
        servers: The fork servers.
        channel: The socket to the parent. In a run over several machines it gets a message with the
            port on which the agents meet.
    """
    from pytest_distcompat.launch import agent

    try:
        message = json.loads(line)
        request = Request.read(message["request"])

        def listens(port: int) -> None:
            channel.sendall(f"{json.dumps({'listens': port})}\n".encode())

        if message["start"] == "spawn":
            return agent.run(request, rank.main, "spawn", listens)
        # The next ranks are forked from servers of this kind, in turn from the two sides.
        servers.choose(message["start"], request.turn, len(request.here))
        return agent.run(request, rank.forked, "forkserver", listens)
    except Exception:
        return {"exit_codes": None, "launch_error": traceback.format_exc()}


def _handle_by_default() -> None:
    """Give signals their default handlers, which ranks inherit.

    pytest ignores some of them, as ``nohup pytest`` does. torchrun's agent handles these four
    (torch/distributed/elastic/multiprocessing/api.py), and what a process handles is handled by
    default in a program that it starts.
    """
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _start_fork_servers(warmth: str, descriptor: int) -> tuple[ForkServers, dict[str, Any]]:
    """Start all fork servers; return them and their merged status (``_merged``).

    Args:
        warmth: As for ``main``.
        descriptor: The socket of the launcher process, which forked servers close.
    """
    warmth_fields = json.loads(Path(warmth).read_text(encoding="utf-8"))
    # If an import hangs, its stack is written at this time. The parent gives up somewhat later, and
    # shows it.
    dump_at = clock.now() + 0.9 * warmth_fields["timeout"]
    # ``call`` is the function that collects tests; without it no session server is needed.
    kinds: tuple[str, ...] = (LIBRARIES,)
    if warmth_fields["call"]:
        kinds = (LIBRARIES, SESSION)
    servers = ForkServers(kinds)
    # The second side imports everything itself. Meanwhile this process imports torch, for itself
    # and for the servers of the first side.
    command = in_new_process("serve_alone", warmth, str(dump_at))
    log = Path(warmth).with_name(LOGS[1])
    servers.spawn(1, command, log)
    # A warning that the user made an error is an error in ranks only.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        preload.import_modules(preload.MODULES_OF_EVERY_RANK, dump_at)

    def serve_first(ends: Mapping[str, Ends]) -> NoReturn:
        os.close(descriptor)
        _serve(ends, warmth_fields, dump_at)

    servers.fork(0, serve_first)
    warnings.simplefilter("ignore")
    # Imported now, while the servers import.
    from pytest_distcompat.launch import agent  # noqa: F401

    return servers, _merged(servers.wait_until_serving())


def serve_alone(warmth: str, dump_at: str, ends: str) -> NoReturn:
    """Be the fork servers of a side, in an interpreter of their own.

    The arguments are texts, from the command line.

    Args:
        warmth: As for ``main``.
        dump_at: When to write the stack of an import that hangs, by ``clock.now``.
        ends: The file descriptors of each server as JSON: ``{"libraries": [5, 6, 7], "session":
            [8, 9, 10]}`` (``forking.Ends``).
    """
    ends_by_kind: dict[str, Ends] = {}
    for kind, descriptors in json.loads(ends).items():
        ends_by_kind[kind] = Ends(*descriptors)
    warmth_fields = json.loads(Path(warmth).read_text(encoding="utf-8"))
    _serve(ends_by_kind, warmth_fields, float(dump_at))


def _serve(ends: Mapping[str, Ends], warmth_fields: Mapping[str, Any], dump_at: float) -> NoReturn:
    """Be the fork servers of a side: import libraries, fork the session server, and serve.

    The session server tells this one by a pipe which libraries the tests have imported besides.
    """
    die_with_parent()
    # As in a new interpreter: an imported module may read it.
    sys.argv[1:] = []
    status = preload.import_libraries(warmth_fields, dump_at)
    # To a rank a library looks as if it was not imported yet, until the rank imports it.
    unimported.hide()
    if SESSION in ends:
        read, write = os.pipe()
        if os.fork() == 0:
            os.close(read)
            _serve_session(ends, warmth_fields, dump_at, write)
        os.close(write)
        ends[SESSION].close()
        with os.fdopen(read, encoding="utf-8") as file:
            libraries = file.read()
        # Ranks that must import the user's own modules themselves are forked from this server, and
        # should find those libraries imported. The text is empty if the other server died.
        if libraries:
            preload.import_modules(json.loads(libraries), dump_at)
        preload.settle(warmth_fields["device"])
        unimported.hide()
    serve(ends[LIBRARIES], status)


def _serve_session(
    ends: Mapping[str, Ends],
    warmth_fields: Mapping[str, Any],
    dump_at: float,
    libraries_descriptor: int,
) -> NoReturn:
    """Be the fork server that collects tests, in a fork of the one that has imported libraries.

    It writes to ``libraries_descriptor``, a pipe to the other server, the names of modules that the
    tests imported besides.
    """
    die_with_parent()
    # The user's modules are imported in this process. They may ask for the session, or signal their
    # process group, as they could on a rank.
    rank.lead_session()
    ends[LIBRARIES].close()
    status = preload.collect(warmth_fields, dump_at)
    with os.fdopen(libraries_descriptor, "w", encoding="utf-8") as file:
        json.dump(status.pop("libraries"), file)
    serve(ends[SESSION], status, preload.finish)


def _merged(sides: list[dict[str, dict[str, Any] | None]]) -> dict[str, Any]:
    """Return the status for the parent, made of those of all servers.

    ``unfit`` is the first problem of a libraries server, ``not_shared`` that of a session server,
    and ``findings`` has those of each session server.

    Args:
        sides: For each side, by kind of server, the status that ``preload`` returned; None if the
            server died before.
    """
    libraries = []
    sessions = []
    for side in sides:
        # If the libraries server died, the status of the session server, its child, is not needed.
        libraries.append(side[LIBRARIES] or {"unfit": _DIED})
        if side[LIBRARIES] and SESSION in side:
            sessions.append(side[SESSION] or {"unfit": _DIED})
    findings = []
    for status in sessions:
        if "findings" in status:
            findings.append(status["findings"])
    return {
        "unfit": _first_problem(libraries),
        "not_shared": _first_problem(sessions),
        "findings": findings,
        "leaves": any(status.get("leaves") for status in sessions),
    }


def _first_problem(statuses: list[dict[str, Any]]) -> str:
    """Return why ranks must not be forked from one of the servers with these statuses.

    It is empty if they may.
    """
    for status in statuses:
        if status["unfit"]:
            return str(status["unfit"])
    return ""
