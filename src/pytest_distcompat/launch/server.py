"""The launcher process: one beside each pytest process, with torch imported, so that pytest need not.

It reads one request a line from a socket and answers one JSON line: first that it is warm, then how each life ended.
"""

from __future__ import annotations

import json
import multiprocessing.util
import os
import socket
import tempfile
import traceback
from pathlib import Path
from typing import Any

from pytest_distcompat import clock
from pytest_distcompat.launch import preload, rank
from pytest_distcompat.launch.forking import start_fork_server
from pytest_distcompat.launch.process import adopt_orphans, children, die_with_parent, reap_adopted
from pytest_distcompat.launch.request import Request


def main(descriptor: int, warmth: str) -> None:
    """Serve until the other end of the socket closes; ``warmth`` is a file, see ``preload``."""
    die_with_parent()
    adopt_orphans()
    # Where multiprocessing puts the fork server's socket: into our parent's directory, which goes with our parent, and whose path
    # is short enough. Killed as we are, maybe at this moment, we could not remove one of our own.
    tempfile.tempdir = str(Path(warmth).parent)
    multiprocessing.util.get_temp_dir()
    tempfile.tempdir = None
    status = _start_fork_server(warmth, descriptor)
    own = children(os.getpid())
    channel = socket.socket(fileno=descriptor)
    os.set_inheritable(descriptor, False)
    lines = channel.makefile("r", encoding="utf-8")
    start_method = "spawn" if status["unfit"] else "forkserver"
    _answer(channel, {"event": "warm", **status})
    from pytest_distcompat.launch import agent

    for line in lines:
        began = clock.now()
        # Here, not after the life: its left-overs are killed by our parent once it has the answer.
        reap_adopted(keep=own)
        try:
            request = Request.read(line.strip())
            outcome: dict[str, Any] = agent.run(request, rank.main, start_method)
        except Exception:
            outcome = {"exit_codes": None, "launch_error": traceback.format_exc()}
        _answer(channel, {"event": "ended", "seconds": clock.now() - began, **outcome})


def _answer(channel: socket.socket, message: dict[str, Any]) -> None:
    channel.sendall((json.dumps(message) + "\n").encode())


def _start_fork_server(warmth: str, descriptor: int) -> dict[str, Any]:
    """Import torch, fork it, and wait until it has preloaded all; ``descriptor`` is not for it."""
    wanted = json.loads(Path(warmth).read_text(encoding="utf-8"))
    # Before our parent gives up and shows what we wrote.
    late = clock.now() + 0.9 * wanted["timeout"]
    preload.import_torch(late)

    def prepare() -> str:
        die_with_parent()
        os.close(descriptor)
        return json.dumps(preload.main(wanted, late))

    told = start_fork_server(prepare)
    # Meanwhile: the import is the work.
    from pytest_distcompat.launch import agent  # noqa: F401

    said = told()
    return json.loads(said) if said else {"missing": {}, "unfit": "it died while it imported", "error": ""}
