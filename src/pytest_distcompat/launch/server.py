"""The launcher process: one beside each pytest process, with torch imported, so that pytest need not.

It reads one request a line from a socket and answers one JSON line: first that it is warm, then how each run ended.
"""

from __future__ import annotations

import json
import multiprocessing.util
import os
import socket
import sys
import tempfile
import traceback
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from pytest_distcompat import clock
from pytest_distcompat.launch import preload, rank
from pytest_distcompat.launch.forking import LIBRARIES, LOGS, SESSION, Ends, ForkServers, serve
from pytest_distcompat.launch.process import adopt_orphans, alive, children, die_with_parent, reap_adopted
from pytest_distcompat.launch.request import Request, interpreter

#: How long fork servers may take to run what is to be done at their end, in seconds.
FAREWELL = 3.0
#: What is said of a fork server that is gone before it serves.
_DIED = "it died while it imported"


def main(descriptor: int, warmth: str) -> None:
    """Serve until the other end of the socket closes; ``warmth`` is a file, see ``preload``."""
    die_with_parent()
    adopt_orphans()
    # Where multiprocessing puts the fork servers' sockets: into our parent's directory, which goes with our parent, and whose
    # path is short enough. Killed as we are, maybe at this moment, we could not remove one of our own.
    tempfile.tempdir = str(Path(warmth).parent)
    multiprocessing.util.get_temp_dir()
    tempfile.tempdir = None
    servers, status = _start_fork_servers(warmth, descriptor)
    own = children(os.getpid())
    channel = socket.socket(fileno=descriptor)
    os.set_inheritable(descriptor, False)
    lines = channel.makefile("r", encoding="utf-8")
    _answer(channel, {"event": "warm", **status})
    from pytest_distcompat.launch import agent

    for line in lines:
        began = clock.now()
        # Here, not after the run: its left-overs are killed by our parent once it has the answer.
        reap_adopted(keep=own)
        try:
            told = json.loads(line)
            request = Request.read(told["request"])
            if told["start"] == "spawn":
                outcome: dict[str, Any] = agent.run(request, rank.main, "spawn")
            else:
                servers.choose(told["start"], request.turn, request.world_size)
                outcome = agent.run(request, rank.forked, "forkserver")
        except Exception:
            outcome = {"exit_codes": None, "launch_error": traceback.format_exc()}
        _answer(channel, {"event": "ended", "seconds": clock.now() - began, **outcome})
    servers.dismiss()
    clock.wait_until(lambda: not any(alive(pid) for pid in servers.pids), FAREWELL, every=0.01)


def _answer(channel: socket.socket, message: dict[str, Any]) -> None:
    channel.sendall((json.dumps(message) + "\n").encode())


def _start_fork_servers(warmth: str, descriptor: int) -> tuple[ForkServers, dict[str, Any]]:
    """Start all and wait until they have imported; ``descriptor`` is not for them. Returns how they are, put together."""
    wanted = json.loads(Path(warmth).read_text(encoding="utf-8"))
    # Before our parent gives up and shows what we wrote.
    late = clock.now() + 0.9 * wanted["timeout"]
    servers = ForkServers((LIBRARIES, SESSION) if wanted["call"] else (LIBRARIES,))
    # It imports all by itself, while we import torch for us and for the first.
    servers.spawn(1, [*interpreter(), "-c", _OTHER, warmth, str(late)], Path(warmth).with_name(LOGS[1]))
    # What the user made an error is one in ranks.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        preload.import_torch(late)

    def first(ends: Mapping[str, Ends]) -> NoReturn:
        os.close(descriptor)
        _serve(ends, wanted, late)

    servers.fork(0, first)
    warnings.simplefilter("ignore")
    # Meanwhile: the import is the work.
    from pytest_distcompat.launch import agent  # noqa: F401

    return servers, _together(servers.serving())


_OTHER = (
    "import sys; sys.path[:] = filter(None, sys.path); "
    # First of all: who started it may die while it imports.
    "from pytest_distcompat.launch.process import die_with_parent; die_with_parent(); "
    "from pytest_distcompat.launch.server import serve_alone; serve_alone(*sys.argv[1:])"
)


def serve_alone(warmth: str, late: str, ends: str) -> NoReturn:
    """Be the fork servers of a side in an interpreter of their own."""
    told = {kind: Ends(**one) for kind, one in json.loads(ends).items()}
    _serve(told, json.loads(Path(warmth).read_text(encoding="utf-8")), float(late))


def _serve(ends: Mapping[str, Ends], wanted: Mapping[str, Any], late: float) -> NoReturn:
    """Be the fork servers of a side: import libraries, fork the one that collects tests, and serve."""
    die_with_parent()
    # As that of a new interpreter: what is imported here may look at it.
    sys.argv[1:] = []
    status = preload.import_libraries(wanted, late)
    if SESSION in ends:
        read, write = os.pipe()
        if os.fork() == 0:
            die_with_parent()
            os.close(read)
            ends[LIBRARIES].close()
            collected = preload.collect(wanted, late)
            with os.fdopen(write, "w", encoding="utf-8") as file:
                json.dump(collected.pop("libraries"), file)
            serve(ends[SESSION], collected, preload.finish)
        os.close(write)
        ends[SESSION].close()
        with os.fdopen(read, encoding="utf-8") as file:
            said = file.read()
        # For ranks that collect by themselves: all that is the user's own is left to them.
        preload.import_more(json.loads(said) if said else (), late)
    serve(ends[LIBRARIES], status)


def _together(sides: list[dict[str, dict[str, Any] | None]]) -> dict[str, Any]:
    """What our parent is told: of both sides, the first trouble of each kind, and all findings."""
    together: dict[str, Any] = {"missing": {}, "unfit": "", "alone": "", "error": "", "findings": [], "leaves": False}
    for side in sides:
        libraries, session = side[LIBRARIES], side.get(SESSION, {})
        if libraries is None:
            together["unfit"] = together["unfit"] or _DIED
            continue
        together["missing"] |= libraries["missing"]
        together["unfit"] = together["unfit"] or libraries["unfit"]
        if session is None:
            together["alone"] = together["alone"] or _DIED
        elif session:
            together["alone"] = together["alone"] or session["unfit"]
            together["error"] = together["error"] or session["error"]
            together["findings"].append(session["findings"])
            together["leaves"] = together["leaves"] or session["leaves"]
    return together
