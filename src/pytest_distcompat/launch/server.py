"""The launcher process: one beside each pytest process, with torch imported, so that pytest need not.

It reads one request a line from a socket and answers one JSON line: first that it is warm, then how each life ended.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.util
import os
import socket
import tempfile
import traceback
from pathlib import Path
from typing import Any

from pytest_distcompat import clock
from pytest_distcompat.launch import rank
from pytest_distcompat.launch.process import adopt_orphans, children, die_with_parent, reap_adopted
from pytest_distcompat.launch.request import Request


def main(descriptor: int, warmth: str) -> None:
    """Serve until the other end of the socket closes; ``warmth`` is the file that ``preload`` reads."""
    die_with_parent()
    adopt_orphans()
    # Where multiprocessing puts the fork server's socket: into our parent's directory, which goes with our parent, and whose path
    # is short enough. Killed as we are, maybe at this moment, we could not remove one of our own.
    tempfile.tempdir = str(Path(warmth).parent)
    multiprocessing.util.get_temp_dir()
    tempfile.tempdir = None
    channel = socket.socket(fileno=descriptor)
    os.set_inheritable(descriptor, False)
    lines = channel.makefile("r", encoding="utf-8")
    status = _start_fork_server(warmth)
    own = children(os.getpid())
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


def _start_fork_server(warmth: str) -> dict[str, Any]:
    """Start it, import torch meanwhile, and wait until it has preloaded all."""
    multiprocessing.set_forkserver_preload(["pytest_distcompat.launch.warming"])
    os.environ["DISTCOMPAT_WARMTH"] = warmth
    multiprocessing.forkserver.ensure_running()
    del os.environ["DISTCOMPAT_WARMTH"]
    from pytest_distcompat.launch import agent  # noqa: F401 - the import is the work

    # Blocks until the fork server serves, which is after its preload.
    first = multiprocessing.get_context("forkserver").Process(target=_nothing)
    # A fork server that died is told of below.
    with contextlib.suppress(EOFError, OSError):
        first.start()
        first.join()
    wanted = json.loads(Path(warmth).read_text(encoding="utf-8"))
    try:
        status: dict[str, Any] = json.loads(Path(wanted["status"]).read_text(encoding="utf-8"))
    except FileNotFoundError:
        status = {"missing": [], "unfit": "it died while it imported", "error": "", "seconds": 0.0}
    return status


def _nothing() -> None:
    """The first child: being started is all it is for."""
