"""The launcher process (``server``) as pytest's process, its parent, sees it.

The launcher process stands between pytest and the ranks: it has imported torch, it has fork servers
(processes from which ranks are forked), and torchrun's agent starts the ranks in it. There are two
kinds of fork servers, those of *libraries* and those of the *session*, which have collected the
user's tests too; and two of each kind, from different interpreters.
``warm.WarmLauncher`` keeps one ``LauncherProcess``, and replaces it when it is no longer
``intact``:

- ``LauncherProcess(warmth, device)`` starts it, and ``get_warm()`` waits until it has imported what
  the ``Warmth`` names;
- ``send(request)`` has it start the ranks of a run;
- ``receive(deadline)`` returns its answer, a dict such as ``{"exit_codes": [0, 1], "first": 1,
  "ended_at": [12.3, 11.9]}``;
- ``close()`` kills it and all below it.

Each message is a line of JSON on a pair of sockets.
"""

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
from typing import Any, cast

import psutil

from pytest_distcompat import clock, devices
from pytest_distcompat.installed import GET_TORCH
from pytest_distcompat.launch import environment, nccl
from pytest_distcompat.launch.environment import OF_THE_AGENT
from pytest_distcompat.launch.forensics.ending import exit_name
from pytest_distcompat.launch.forking import LIBRARIES, LOGS, SESSION
from pytest_distcompat.launch.import_findings import Findings
from pytest_distcompat.launch.process import (
    alive,
    await_exit,
    descendants,
    kill,
    kill_and_wait,
    let_tidy_up,
    tidies_up,
)
from pytest_distcompat.launch.request import ANY_MODULE, Request, Warmth, in_new_process
from pytest_distcompat.launch.temporary import OwnedDirectory

#: How long the launcher process may take to end by itself, in seconds.
EXIT_TIMEOUT_S = 4.0


class LauncherProcess:
    """One launcher process with its fork servers, from start to end.

    Args:
        warmth: What the fork servers import and collect.
        device: ``cpu`` or ``cuda``.
    """

    def __init__(self, warmth: Warmth, device: str) -> None:
        self._owned = OwnedDirectory()
        self._timeout = warmth.timeout
        #: Is removed with the process, and has a path short enough for a socket.
        self.directory = self._owned.path
        warmth_file = self.directory / "warmth.json"
        warmth_text = json.dumps(_warmth_fields(warmth, device))
        warmth_file.write_text(warmth_text, encoding="utf-8")
        self._channel, server_end = socket.socketpair()
        #: What has arrived and is no whole line yet.
        self._buffer = b""
        #: The environment of the process, which ranks inherit.
        self.base = environment.of_launcher(os.environ, device)
        with server_end, (self.directory / LOGS[0]).open("wb") as log:
            self._process = subprocess.Popen(
                in_new_process("main", str(server_end.fileno()), str(warmth_file)),
                pass_fds=[server_end.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.base,
                # Ctrl-C is for pytest, which then ends this process.
                start_new_session=True,
            )
        #: The first message of the process; None until it is ready. The keys: ``unfit`` and
        #: ``not_shared`` (see the members of these names; both are empty if all is well),
        #: ``findings`` (those of each session server) and ``leaves`` (whether a session was
        #: collected, which must be ended).
        self.status: dict[str, Any] | None = None
        #: The processes below this one that belong to it, and are no ranks: fork servers.
        self._own_pids: set[int] = set()
        #: The directories and sockets by which ranks are started.
        self._paths = [self.directory]
        #: What the user's modules did at their import that ranks must do themselves.
        self._findings = Findings()

    @property
    def dead(self) -> bool:
        """Tell whether the process has ended."""
        return self._process.poll() is not None

    @property
    def intact(self) -> bool:
        """Tell whether the process, its fork servers and their sockets are there.

        Without one of them it must be replaced. A cleaner of temporary files, or a test, may have
        removed the sockets. If the servers are unfit, no rank is forked from them, and it does not
        matter whether they live.
        """
        if self.dead or not all(path.exists() for path in self._paths):
            return False
        return self.unfit != "" or all(map(alive, self._own_pids))

    @property
    def unfit(self) -> str:
        """Why no rank may be forked from its servers; empty if ranks may.

        For example ``it initialised CUDA, which does not survive a fork``.
        """
        return str(self.status["unfit"]) if self.status is not None else ""

    def get_warm(self) -> str:
        """Wait until the process is ready, and return what went wrong; empty if nothing did."""
        if self.status is not None:
            return ""
        self.status = self.receive(clock.now() + self._timeout)
        if self.status is None:
            return self.death_report("while it got ready")
        for findings in self.status["findings"]:
            self._findings.join(Findings(**findings))
        # No rank has been started so far: what is below the process are its fork servers.
        for process in self._below():
            if alive(process.pid):
                self._own_pids.add(process.pid)
        for path in self.directory.rglob("*"):
            if path.is_dir() or path.is_socket():
                self._paths.append(path)
        return ""

    def not_shared(self, request: Request) -> str:
        """Return why the ranks of a request must collect their tests themselves.

        It is empty if they may inherit the tests that the session server has collected. For example
        ``/repo/test_a.py:3 reads RANK at import``.
        """
        assert self.status is not None
        problem = str(self.status["not_shared"])
        if problem:
            return problem
        # A finding is of no account where ranks have the same value of the variable that was read.
        # These they have with another value than the fork server.
        differing = {*request.set, *request.unset}

        def differs(variable: str) -> bool:
            return variable in differing or OF_THE_AGENT.fullmatch(variable) is not None

        # The test module whose tests the ranks run; None for tests of several modules.
        file = None if request.collected == ANY_MODULE else request.collected
        return self._findings.reason(file, differs)

    def send(self, request: Request) -> None:
        """Send a request to the process. If it died just now, ``receive`` notices."""
        start = self._start_for(request)
        with contextlib.suppress(BrokenPipeError):
            message = json.dumps({"request": str(request.write()), "start": start})
            self._channel.sendall(f"{message}\n".encode())

    def _start_for(self, request: Request) -> str:
        """Return how the ranks of a request start.

        ``spawn``: as new interpreters. ``session``: forked from a server that has collected the
        tests. ``libraries``: forked from a server that has imported libraries only.
        """
        if self.unfit:
            return "spawn"
        if request.collected and not self.not_shared(request):
            return SESSION
        return LIBRARIES

    def receive(
        self, deadline: float, others: Sequence[socket.socket] = ()
    ) -> dict[str, Any] | None:
        """Return the process's next answer.

        Return None when the deadline passes, when there is something to read from another socket,
        or when the process is gone.

        Args:
            deadline: By ``clock.now``.
            others: Further sockets to wait for: those on which ranks of an open run reply.
        """
        while b"\n" not in self._buffer:
            seconds_left = max(0.0, deadline - clock.now())
            ready, _, _ = select.select([self._channel, *others], [], [], seconds_left)
            if self._channel not in ready:
                return None
            try:
                received = self._channel.recv(65536)
            except ConnectionError:
                received = b""
            if not received:
                # The process has closed its end: it is about to end. Then ``dead`` is true.
                await_exit(self._process, 1.0)
                return None
            self._buffer += received
        line, _, self._buffer = self._buffer.partition(b"\n")
        return cast("dict[str, Any]", json.loads(line))

    def stop_agent(self) -> None:
        """Stop the agent, which would wait for ever for ranks that all ended by ``os._exit(0)``."""
        self._process.send_signal(signal.SIGTERM)

    def death_report(self, when: str) -> str:
        """Return what the process wrote last, and how it died; the last line is the headline.

        Args:
            when: When it died, as ``while ranks ran``.
        """
        log = self._last_output()
        if not self.dead:
            hangs = (
                "a module or a conftest.py hangs at import, "
                "or needs more time (--distcompat-warm-timeout)"
            )
            return (
                f"{log}\nthe launcher process did not get ready within {self._timeout:g} s: {hangs}"
            )
        if "ModuleNotFoundError: No module named 'torch'" in log:
            return f"{log}\ntorch is not installed: {GET_TORCH}"
        code = exit_name(self._process.poll())
        return f"{log}\nthe launcher process died {when} ({code})"

    def _last_output(self) -> str:
        """Return the last output of this process and of the fork servers.

        The servers of both interpreters mostly fail in the same way: of outputs that end with the
        same line, only one is returned.
        """
        texts_by_last_line = {}
        for name in reversed(LOGS):
            file = self.directory / name
            if not file.exists():
                continue
            text = file.read_text(encoding="utf-8", errors="replace")[-8000:]
            if text:
                texts_by_last_line[text.splitlines()[-1]] = text
        return "\n".join(texts_by_last_line.values())

    def strays(self) -> list[psutil.Process]:
        """Return the ranks and their children that still run below this process.

        Processes that tidy up after others end by themselves, and are left out.
        """
        strays = []
        for process in self._below():
            if process.pid in self._own_pids or not alive(process.pid):
                continue
            if not tidies_up(process):
                strays.append(process)
        return strays

    def _below(self) -> list[psutil.Process]:
        """Return all processes below this one; none if it is dead.

        The number of a dead process may be another's by now.
        """
        return [] if self.dead else descendants(self._process.pid)

    @property
    def _has_farewell(self) -> bool:
        """Tell whether a fork server has collected a session, and can end it.

        At the end of a session pytest calls hooks of the user's, and so do exit functions.
        """
        if self.status is None or not self.status["leaves"]:
            return False
        return self.intact and not self.unfit

    def close(self, *, farewell: bool = False) -> None:
        """Kill the process and all below it.

        Args:
            farewell: Whether it may first end the collected session, as pytest does at its end.
        """
        try:
            if farewell and self._has_farewell:
                # The end of its input tells it to end.
                with contextlib.suppress(OSError):
                    self._channel.shutdown(socket.SHUT_WR)
                await_exit(self._process, EXIT_TIMEOUT_S)
            below = self._below()
            # These wait for the end of the launcher process too.
            tidying = [process for process in below if tidies_up(process)]
            kill(below)
            kill_and_wait(self._process)
            let_tidy_up(tidying)
        finally:
            # Ctrl-C may interrupt the above, as in a worker of xdist that is done before the
            # others. What is below the process dies with it.
            kill_and_wait(self._process)
            self._channel.close()
            self._owned.remove()


def _warmth_fields(warmth: Warmth, device: str) -> dict[str, Any]:
    """Return what the launcher process reads from a file when it starts.

    It is the fields of the Warmth, the ``device`` and, for GPUs, what pytest's process knows of
    them (``gpus``) and of NCCL (``nccl``). The launcher process must not ask NVML itself: that
    starts a thread, and the fork servers must have none.
    """
    fields = {**dataclasses.asdict(warmth), "device": device}
    if device != "cpu":
        fields["gpus"] = dataclasses.asdict(devices.gpu_facts())
        libraries: list[dict[str, Any]] = []
        for library in nccl.answers():
            libraries.append({"path": str(library.path), "version": library.version})
        fields["nccl"] = libraries
    return fields
