"""The parent's end of the launcher process (``server``): started, talked to, found dead, killed."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import signal
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from pytest_distcompat import clock
from pytest_distcompat.launch import environment
from pytest_distcompat.launch.at_import import Findings
from pytest_distcompat.launch.ending import exit_name
from pytest_distcompat.launch.environment import OF_THE_AGENT
from pytest_distcompat.launch.forking import LIBRARIES, LOGS, SESSION
from pytest_distcompat.launch.process import (
    alive,
    await_exit,
    descendants,
    kill,
    kill_and_wait,
    kill_named,
    let_tidy_up,
    tidies_up,
)
from pytest_distcompat.launch.request import ANY_MODULE, Request, Warmth, interpreter
from pytest_distcompat.launch.temporary import OwnedDirectory

#: How long it may take to end by itself, in seconds.
FAREWELL = 4.0


class LauncherProcess:
    """One launcher process and its fork server, from start to end. ``base`` is the environment that it has."""

    def __init__(self, warmth: Warmth, device: str) -> None:
        self._directory = OwnedDirectory()
        self._timeout = warmth.timeout
        place = self._directory.path
        told = place / "warmth.json"
        wanted = {**dataclasses.asdict(warmth), "device": device}
        told.write_text(json.dumps(wanted), encoding="utf-8")
        self._channel, theirs = socket.socketpair()
        self._buffer = b""
        self.base = environment.of_launcher(os.environ, device)
        # Without the working directory: see extend_import_path.
        script = (
            "import sys; sys.path[:] = filter(None, sys.path); "
            "from pytest_distcompat.launch.server import main; main(int(sys.argv[1]), sys.argv[2])"
        )
        with theirs, (place / LOGS[0]).open("wb") as log:
            self._process = subprocess.Popen(
                [*interpreter(), "-c", script, str(theirs.fileno()), str(told)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.base,
                # Ctrl-C is for pytest, which then ends us.
                start_new_session=True,
            )
        #: What ``preload`` said; None until it is ready.
        self.status: dict[str, Any] | None = None
        self._own: set[int] = set()
        self._findings = Findings()

    @property
    def directory(self) -> Path:
        """A directory that goes with it, by a path short enough for a socket."""
        return self._directory.path

    @property
    def pid(self) -> int:
        """Its number."""
        return self._process.pid

    @property
    def dead(self) -> bool:
        """Whether it ended."""
        return self._process.poll() is not None

    @property
    def intact(self) -> bool:
        """Whether it is there, and its fork server too: one whose server died must be replaced.

        A server that nothing is forked from may die, and one that died while it imported may do so at its leisure.
        """
        return not self.dead and (bool(self.unfit) or all(alive(pid) for pid in self._own))

    @property
    def unfit(self) -> str:
        """Why its fork server must not be forked from; empty if it may."""
        return str(self.status["unfit"]) if self.status is not None else ""

    @property
    def missing(self) -> dict[str, str]:
        """Which modules it could not import, and why."""
        return dict(self.status["missing"]) if self.status is not None else {}

    def get_warm(self) -> str:
        """Wait until it is ready; what went wrong, if something did."""
        if self.status is not None:
            return ""
        self.status = self.receive(clock.now() + self._timeout)
        if self.status is None:
            return self.death("while it got ready")
        for found in self.status["findings"]:
            self._findings.join(Findings(**found))
        self._own = {process.pid for process in self._below() if alive(process.pid)}
        return ""

    def not_shared(self, request: Request) -> str:
        """Return why the ranks of a request that runs tests must collect them themselves; empty if they may inherit them."""
        assert self.status is not None
        differing = {*request.set, *request.unset}
        file = None if request.collected == ANY_MODULE else request.collected
        return str(self.status["alone"]) or self._findings.reason(
            file, lambda name: name in differing or OF_THE_AGENT.fullmatch(name) is not None
        )

    def send(self, request: Request) -> None:
        """Hand it that request. If it died just now, nobody hears."""
        start = "spawn" if self.unfit else SESSION if request.collected and not self.not_shared(request) else LIBRARIES
        with contextlib.suppress(BrokenPipeError):
            self._channel.sendall(f"{json.dumps({'request': str(request.write()), 'start': start})}\n".encode())

    def receive(self, deadline: float, others: Sequence[socket.socket] = ()) -> dict[str, Any] | None:
        """Its next answer; None when the deadline passes, when there is something on another socket, or when it is gone."""
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._channel, *others], [], [], max(0.0, deadline - clock.now()))
            if self._channel not in ready:
                return None
            try:
                received = self._channel.recv(65536)
            except ConnectionError:
                received = b""
            if not received:
                await_exit(self._process, 1.0)
                return None
            self._buffer += received
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def stop_waiting(self) -> None:
        """Tell the agent that no rank is left: it would wait for ever for ranks that all left by ``os._exit(0)``."""
        self._process.send_signal(signal.SIGTERM)

    def death(self, when: str) -> str:
        """What it wrote last, and how it died."""
        files = [self.directory / name for name in LOGS]
        logs = [file.read_text(encoding="utf-8", errors="replace")[-8000:] for file in files if file.exists()]
        # All import the same, and mostly come to the same end.
        log = "\n".join({text.splitlines()[-1]: text for text in reversed(logs) if text}.values())
        if not self.dead:
            hangs = "a module or a conftest.py hangs at import, or needs more time (--distcompat-warm-timeout)"
            return f"{log}\nthe launcher process did not get ready within {self._timeout:g} s: {hangs}"
        return f"{log}\nthe launcher process died {when} ({exit_name(self._process.poll())})"

    def clear_up(self) -> list[str]:
        """Kill what ranks left running; who they were."""
        return kill_named(self.strays())

    def strays(self) -> list[psutil.Process]:
        """What runs below it and is no part of it: ranks, and what they started, without those that will end by themselves."""
        others = (process for process in self._below() if process.pid not in self._own and alive(process.pid))
        return [process for process in others if not tidies_up(process)]

    def _below(self) -> list[psutil.Process]:
        """All processes below it; none if it is dead, for its number may be another's by now."""
        return [] if self.dead else descendants(self._process.pid)

    def close(self, *, farewell: bool = False) -> None:
        """Kill it and all below it. With ``farewell`` it gets a moment to do what collected tests want done at the end."""
        try:
            if farewell and self.status is not None and self.status["leaves"] and self.intact and not self.unfit:
                with contextlib.suppress(OSError):
                    self._channel.shutdown(socket.SHUT_WR)
                await_exit(self._process, FAREWELL)
            below = self._below()
            # They wait for the launcher process too.
            tidy = [process for process in below if tidies_up(process)]
            kill(below)
            kill_and_wait(self._process)
            let_tidy_up(tidy)
        finally:
            # Ctrl-C may come while we are at it, as in a worker of xdist that is done when others are not. What is below it
            # dies with it.
            kill_and_wait(self._process)
            self._channel.close()
            self._directory.remove()
