"""multiprocessing's fork server, forked from this process instead of started as another interpreter."""

from __future__ import annotations

import multiprocessing.forkserver
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


def start_fork_server(prepare: Callable[[], str]) -> Callable[[], str]:
    """Start it, and have it call ``prepare`` before it serves. What is returned waits for the line that gives; empty if it died.

    ``multiprocessing.forkserver.ensure_running`` starts an interpreter, which imports anew what this process has imported:
    with torch 2 s of a core and 100 MiB, in each worker of xdist. To be called while this process has one thread.

    What is private here: ``multiprocessing.forkserver.main``, and three attributes by which multiprocessing knows its fork
    server. ``tests/spawn/test_private_names.py`` says when they move. Python 3.14 asks those that connect for a key, but for
    a server that was started without one, as this is; its socket lies in a directory of the user's alone.
    """
    # Ranks are handed its descriptor.
    multiprocessing.resource_tracker.ensure_running()
    address = str(Path(multiprocessing.util.get_temp_dir()) / "fork-server")
    alive_read, alive_write = os.pipe()
    ready_read, ready_write = os.pipe()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        pid = os.fork()
        if pid == 0:
            os.close(alive_write)
            os.close(ready_read)
            _serve(listener.detach(), alive_read, ready_write, prepare)
    os.close(alive_read)
    os.close(ready_write)
    server: Any = multiprocessing.forkserver._forkserver  # noqa: SLF001 - see the docstring
    server._forkserver_address = address  # noqa: SLF001
    server._forkserver_alive_fd = alive_write  # noqa: SLF001
    server._forkserver_pid = pid  # noqa: SLF001

    def told() -> str:
        # A line, not all: somebody whom it forked meanwhile may have the other end open.
        with os.fdopen(ready_read, encoding="utf-8") as ready:
            return ready.readline()

    return told


def _serve(listener: int, alive: int, ready: int, prepare: Callable[[], str]) -> None:
    """What the fork server does; never returns."""
    code = 1
    try:
        # As that of a new interpreter: what is imported here may look at it.
        sys.argv[1:] = []
        with os.fdopen(ready, "w", encoding="utf-8") as file:
            file.write(f"{prepare()}\n")
        multiprocessing.forkserver.main(listener, alive, [])
    except SystemExit:
        # Nobody is left who would ask it for a process.
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)
