"""The default launcher: forks ranks from processes that have imported torch (fork servers).

A launcher starts the ranks of a run (one process group from start to end) and returns how they
ended. ``WarmLauncher.run(request)`` sends the request to its launcher process
(``launcher_process``), in which torchrun's agent starts the ranks. Then it waits for the agent's
answer, while a ``Watchdog`` enforces the time limit, and returns an ``Ending``.

``WarmLauncher.open(...)`` starts ranks that stay: they get one request after the other on a socket
(``OpenWarmRun``). ``ext/reuse`` runs several tests on such ranks.

Sessions create the launcher (``plugin/session``, ``engine``), mostly wrapped into a
``leased.LeasedLauncher``, which leases devices for each run.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pytest_distcompat import clock
from pytest_distcompat.launch import environment, loopback
from pytest_distcompat.launch.forensics.ending import Ending
from pytest_distcompat.launch.forensics.watchdog import Watchdog
from pytest_distcompat.launch.launcher import Launcher, Replies
from pytest_distcompat.launch.launcher_process import LauncherProcess
from pytest_distcompat.launch.process import kill
from pytest_distcompat.launch.request import Request, Warmth

#: How long torchrun's agent may take to notice that its ranks are gone, in seconds.
AGENT_TIMEOUT_S = 5.0
#: After how many seconds it is notified if it has not noticed.
AGENT_NOTIFIED_AFTER_S = 0.2


class WarmLauncher(Launcher):
    """A launcher that keeps one launcher process, and replaces it when it breaks.

    Args:
        warmth: What the launcher process imports and collects in advance.
        device: ``cpu`` or ``cuda``.
    """

    def __init__(self, warmth: Warmth, *, device: str = "cpu") -> None:
        self._warmth = warmth
        self._device = device
        #: The launcher process; None before the first run, and after it broke.
        self._process: LauncherProcess | None = None
        #: The run that is held open; None without one. While there is one, the agent is busy.
        self._open_run: OpenWarmRun | None = None
        #: Whether the session has had the notice on slow starts.
        self._notice_given = False
        #: The watchdog of the run that goes on, or of the last one.
        self.watch: Watchdog | None = None
        #: For runs over several machines: called on the first machine, with the port on which the
        #: agents of all machines meet.
        self.listens: Callable[[int], None] = lambda _: None

    def warm_up(self) -> None:
        """Start the launcher process, without waiting until it is ready."""
        if self._process is None or not self._process.intact:
            self.close(farewell=False)
            self._process = LauncherProcess(self._warmth, self._device)

    def get_warm(self) -> str:
        """Wait until the launcher process is ready.

        Return what went wrong; empty if nothing did.
        """
        if problem := loopback.problem():
            return problem
        self.warm_up()
        assert self._process is not None
        if problem := self._process.get_warm():
            self.close(farewell=False)
        return problem

    def run(self, request: Request) -> Ending:
        """Start the ranks, wait until they ended or were killed, and return how.

        It never raises for what the ranks do.
        """
        self.watch = None
        try:
            if problem := self.get_warm():
                return Ending.not_launched(request.world_size, problem)
            assert self._process is not None
            assert self._open_run is None, "its ranks have the agent"
            # The ranks are forked with the launcher process's environment: the request says which
            # variables they must set and unset to have what torchrun would give them.
            request = environment.adapted(request, self._process.base, self._device)
            watch = self.watch = Watchdog(request)
            self._process.send(request)
            run = WarmRun(self, self._process)
            return run.conclude(watch, run.wait(watch))
        except BaseException:
            # Ctrl-C, or pytest-timeout's signal: no process of ours may live on.
            self.close(farewell=False)
            raise

    @property
    def can_open(self) -> bool:
        """Tell that it can hold a run open."""
        return True

    def open(self, request: Request, target: str) -> OpenWarmRun:
        """Start ranks that get requests, and return their run while it goes on.

        Args:
            request: The first request, with the environment and the number of ranks.
            target: The function that each rank calls, as ``module:function``. It performs one
                request after the other.
        """
        assert self._process is not None
        assert self._open_run is None, "its ranks have the agent"
        self._open_run = OpenWarmRun(self, self._process, request, target, self._device)
        return self._open_run

    def forget(self, run: OpenWarmRun) -> None:
        """Note that an open run has been concluded."""
        if self._open_run is run:
            self._open_run = None

    def notice(self, process: LauncherProcess, request: Request) -> str:
        """Return what the user should know about the fork servers.

        Only the first notice of a session is given.
        """
        if self._notice_given:
            return ""
        notice = _describe_slow_start(process, request)
        self._notice_given = bool(notice)
        return notice

    def close(self, *, farewell: bool = True) -> None:
        """End the launcher process and all processes below it.

        Args:
            farewell: Whether the collected session may be ended properly first, as pytest does at
                its end. Not while the ranks of an open run live.
        """
        if self._open_run is not None:
            self._open_run.release()
            farewell = False
        if self._process is not None:
            self._process.close(farewell=farewell)
            self._process = None


class WarmRun:
    """A run of a launcher process: waits for its ranks, and finds out how they ended."""

    def __init__(self, launcher: WarmLauncher, process: LauncherProcess) -> None:
        self._launcher = launcher
        self._process = process

    def wait(self, watch: Watchdog, replies: Replies | None = None) -> dict[str, Any] | None:
        """Wait for the ranks to end, and return the agent's final answer.

        For example ``{"exit_codes": [0, 1], "first": 1, "ended_at": [12.3, 11.9]}``; or
        ``{"launch_error": "..."}`` if the launcher process died or the agent failed.

        Return None if the agent does not answer in time after the watchdog has killed the ranks, or
        if all ``replies`` have arrived: then the ranks go on to the next request.
        """
        agent_notified = False
        process = self._process
        sockets = replies.sockets if replies is not None else []
        while True:
            answer = process.receive(clock.now() + 0.1, sockets)
            if answer is not None:
                # The first answer of a run over several machines is the port of its store.
                if "listens" not in answer:
                    return answer
                self._launcher.listens(answer["listens"])
            if replies is not None:
                sockets = replies.receive()
                if replies.complete:
                    return None
            watch.check()
            if process.dead:
                return {"launch_error": process.death_report("while ranks ran")}
            # The time since the watchdog has killed the ranks; below 0 while it has not.
            since_acted = clock.now() - watch.acted_at
            if since_acted > AGENT_TIMEOUT_S:
                return None
            if since_acted > AGENT_NOTIFIED_AFTER_S and not agent_notified:
                agent_notified = True
                process.stop_agent()

    def conclude(self, watch: Watchdog, answer: Mapping[str, Any] | None) -> Ending:
        """Return how the request ended, once its ranks are gone.

        Args:
            watch: The watchdog of the request.
            answer: What ``wait`` returned. If it is None or has a ``launch_error``, the launcher
                process is of no use any more and is ended.
        """
        # Processes that ranks have left behind.
        left_over = kill(self._process.strays())
        ending = self._ending(watch, answer or {}, left_over=tuple(left_over))
        if answer is None or "launch_error" in answer:
            self._launcher.close(farewell=False)
        return ending

    def _ending(self, watch: Watchdog, answer: Mapping[str, Any], **more: Any) -> Ending:
        """Return how the watched request ended, with what the agent answered.

        Args:
            watch: The watchdog of the request.
            answer: The agent's answer; empty if the ranks go on.
            **more: Further fields of the ``Ending``.
        """
        more["notice"] = more.get("notice") or self._launcher.notice(self._process, watch.request)
        return watch.conclude(
            answer.get("exit_codes"),
            first=answer.get("first"),
            ended_at=answer.get("ended_at"),
            launch_error=answer.get("launch_error", ""),
            command=watch.request.command(),
            **more,
        )


class OpenWarmRun(WarmRun):
    """A run of a launcher process whose ranks get requests on a socket (``launcher.OpenRun``).

    Args:
        launcher: The launcher, for which this is the only open run.
        process: Its launcher process.
        first: The first request: the ranks start with its environment and world size.
        target: The function that the ranks call. It connects to the socket, and performs each
            request that arrives.
        device: ``cpu`` or ``cuda``.
    """

    def __init__(
        self,
        launcher: WarmLauncher,
        process: LauncherProcess,
        first: Request,
        target: str,
        device: str,
    ) -> None:
        super().__init__(launcher, process)
        #: Whether the ranks may get further requests.
        self.open = True
        self._device = device
        inherited = environment.of_ranks(os.environ, device, first.world_size)
        #: The environment of the ranks between two requests.
        self._environment = {**inherited, **first.set}
        self._socket_path = process.directory / "requests"
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(self._socket_path))
        self.listener.listen(first.world_size)
        self.start_request = replace(
            environment.adapted(first, process.base, device),
            target=target,
            payload={"socket": str(self._socket_path)},
            directory=str(Path(first.directory) / "ranks"),
            # Each request brings the working directory and the import path itself.
            cwd="",
            import_path=(),
        )
        process.send(self.start_request)

    def adapted(self, request: Request) -> Request:
        """Return a request with the changes that these ranks need to do it as if started for it."""
        return environment.adapted(request, self._environment, self._device)

    def ending(self, watch: Watchdog, *, notice: str = "") -> Ending:
        """Return how the watched request has ended, though its ranks go on."""
        return self._ending(watch, {}, notice=notice)

    def conclude(self, watch: Watchdog, answer: Mapping[str, Any] | None) -> Ending:
        """Return how the watched request ended, once the ranks are gone.

        The run is no longer open.
        """
        self.release()
        return super().conclude(watch, answer)

    def release(self) -> None:
        """Remove the socket, and tell the launcher that it has no open run any more."""
        self.open = False
        self.listener.close()
        self._socket_path.unlink(missing_ok=True)
        self._launcher.forget(self)


def _describe_slow_start(process: LauncherProcess, request: Request) -> str:
    """Return why the ranks of the request start slower than they could; empty if they do not."""
    if process.unfit:
        return (
            f"the fork server cannot be forked from: {process.unfit}. "
            "Ranks are started by spawn instead, seconds slower each. "
            "Look for code at import time in a conftest.py or a test module."
        )
    reason = process.not_shared(request) if request.collected else ""
    if reason:
        return (
            f"each rank imports the tests itself, as under torchrun, which takes longer: {reason}, "
            "and ranks that are forked after that would share what came of it."
        )
    return ""
