"""The default launcher: torchrun's agent in a launcher process of ours, ranks forked from a warm fork server."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from pytest_distcompat import clock
from pytest_distcompat.launch import environment, loopback
from pytest_distcompat.launch.forensics.ending import Ending
from pytest_distcompat.launch.forensics.watchdog import Watchdog
from pytest_distcompat.launch.launcher_process import LauncherProcess
from pytest_distcompat.launch.process import kill
from pytest_distcompat.launch.request import Request, Warmth
from pytest_distcompat.launch.reused_ranks import Reuse, ReusedRanks

#: How long the agent may take to notice that its ranks are gone, in seconds.
AGENT_TIMEOUT_S = 5.0
#: After how many seconds it is notified.
AGENT_NOTIFIED_AFTER_S = 0.2


class WarmLauncher:
    """A launcher that keeps one launcher process with its fork servers, and replaces it when it breaks."""

    def __init__(self, warmth: Warmth, *, device: str = "cpu") -> None:
        self._warmth = warmth
        self._device = device
        self._process: LauncherProcess | None = None
        self._reused: ReusedRanks | None = None
        self._notice_given = False
        #: The watchdog of the run that goes on, or of the last one.
        self.watch: Watchdog | None = None
        #: Called with the port on which the agents of a run meet, on the machine that opens it.
        self.listens: Callable[[int], None] = lambda _: None

    def warm_up(self) -> None:
        """Start the launcher process, without waiting until it is ready."""
        if self._process is None or not self._process.intact:
            self.close(farewell=False)
            self._process = LauncherProcess(self._warmth, self._device)

    def get_warm(self) -> str:
        """Wait until the launcher process is ready, and return what went wrong; empty if nothing did."""
        if problem := loopback.problem():
            return problem
        self.warm_up()
        assert self._process is not None
        if problem := self._process.get_warm():
            self.close(farewell=False)
        return problem

    def run(self, request: Request, reuse: Reuse | None = None) -> Ending:
        """Start the ranks, or reuse those of an earlier request, and wait until they ended or have done the request."""
        self.watch = None
        try:
            if problem := self.get_warm():
                return Ending.not_launched(request.world_size, problem)
            assert self._process is not None
            if reuse is not None:
                return self._run_reused(self._process, request, reuse)
            self.retire()
            request = environment.adapted(request, self._process.base, self._device)
            watch = self.watch = Watchdog(request)
            self._process.send(request)
            return self._conclude(self._process, watch, self._wait(self._process, watch))
        except BaseException:
            # Ctrl-C, or pytest-timeout's signal: no process of ours may live on.
            self.close(farewell=False)
            raise

    @property
    def reuse_scope(self) -> str:
        """The scope of the ranks that wait for a request; empty if there are none."""
        return self._reused.reuse.scope if self._reused is not None else ""

    def retire(self) -> str:
        """End the ranks that wait for a request, if there are any, and return what went wrong."""
        if self._reused is None or self._process is None:
            return ""
        # The last request's fixtures are torn down now, and have the time limit that it had.
        watch = Watchdog(self._reused.current_request, self._reused.files)
        ending = self._dismiss_reused(self._process, self._reused, watch)
        return ending.text() if ending.failed else ""

    def _run_reused(self, process: LauncherProcess, request: Request, reuse: Reuse) -> Ending:
        """Do the request with reused ranks, which wait for the next one if all went well."""
        died = self._died_waiting(process)
        if self.reuse_scope != reuse.scope or (self._reused is not None and self._reused.homeless):
            self.retire()
        reused = self._reused
        if reused is None:
            environ = environment.of_ranks(os.environ, self._device, request.world_size)
            ranks = environment.adapted(request, process.base, self._device)
            reused = self._reused = ReusedRanks(
                ranks, reuse, process.directory / "reused", {**environ, **request.set}
            )
            process.send(reused.start_request)
        request = environment.adapted(request, reused.environment, self._device)
        reused.send(request)
        watch = Watchdog(request, reused.files)
        answer = self._wait(process, watch, reused)
        if answer is not None or watch.acted:
            self._reused = None
            reused.dismiss()
            return self._conclude(process, watch, answer)
        if not (reuse.last or reused.end_reason):
            ending = self._ending(process, watch, {}, notice=died)
            # A child that a rank forked may have failed where the rank went on.
            if not ending.failed:
                return ending
        return self._dismiss_reused(process, reused, watch)

    def _died_waiting(self, process: LauncherProcess) -> str:
        """Describe how ranks died while they waited for a request; empty if they did not.

        It becomes a notice: the next request is not to blame.
        """
        if self._reused is None:
            return ""
        self._reused.receive()
        if not self._reused.lost:
            return ""
        ending = self._dismiss_reused(process, self._reused, Watchdog(self._reused.start_request))
        return f"between two tests {ending.headline()}; new ranks were started"

    def _dismiss_reused(
        self, process: LauncherProcess, reused: ReusedRanks, watch: Watchdog
    ) -> Ending:
        """End reused ranks, and return their end as that of the watched request."""
        self._reused = None
        reused.dismiss()
        return self._conclude(process, watch, self._wait(process, watch), left=reused.end_reason)

    def _wait(
        self, process: LauncherProcess, watch: Watchdog, reused: ReusedRanks | None = None
    ) -> dict[str, Any] | None:
        """Return the agent's final answer.

        None, if the agent does not answer in time, or if all reused ranks have replied, which goes on without its answer.
        """
        agent_notified = False
        sockets = reused.sockets if reused is not None else []
        while True:
            answer = process.receive(clock.now() + 0.1, sockets)
            if answer is not None:
                if "listens" not in answer:
                    return answer
                self.listens(answer["listens"])
            if reused is not None:
                sockets = reused.receive()
                if reused.replied:
                    return None
            watch.check()
            if process.dead:
                return {"launch_error": process.death_report("while ranks ran")}
            since_acted = clock.now() - watch.acted_at
            if since_acted > AGENT_TIMEOUT_S:
                return None
            if since_acted > AGENT_NOTIFIED_AFTER_S and not agent_notified:
                agent_notified = True
                process.stop_agent()

    def _conclude(
        self,
        process: LauncherProcess,
        watch: Watchdog,
        answer: Mapping[str, Any] | None,
        **more: Any,
    ) -> Ending:
        """Return how the request ended, once its ranks are gone."""
        left_over = kill(process.strays())
        ending = self._ending(process, watch, answer or {}, left_over=tuple(left_over), **more)
        if answer is None or "launch_error" in answer:
            self.close(farewell=False)
        return ending

    def _ending(
        self, process: LauncherProcess, watch: Watchdog, answer: Mapping[str, Any], **more: Any
    ) -> Ending:
        """Return how the watched request ended, with what the agent answered."""
        more["notice"] = more.get("notice") or self._notice(process, watch.request)
        return watch.conclude(
            answer.get("exit_codes"),
            first=answer.get("first"),
            ended_at=answer.get("ended_at"),
            launch_error=answer.get("launch_error", ""),
            command=watch.request.command(),
            **more,
        )

    def _notice(self, process: LauncherProcess, request: Request) -> str:
        """Return what the user should know about the fork servers; only the first notice of a session is given."""
        if self._notice_given:
            return ""
        notice = _describe_slow_start(process, request)
        self._notice_given = bool(notice)
        return notice

    def close(self, *, farewell: bool = True) -> None:
        """End the launcher process and all processes below it; with ``farewell`` it may run its exit functions first."""
        if self._reused is not None:
            self._reused.dismiss()
            self._reused = None
            farewell = False
        if self._process is not None:
            self._process.close(farewell=farewell)
            self._process = None


def _describe_slow_start(process: LauncherProcess, request: Request) -> str:
    """Return why the ranks of the request start slower than they could; empty if they do not."""
    if process.unfit:
        return (
            f"the fork server cannot be forked from: {process.unfit}. Ranks are started by spawn instead, "
            "seconds slower each. Look for code at import time in a conftest.py or a test module."
        )
    reason = process.not_shared(request) if request.collected else ""
    if reason:
        return (
            f"each rank imports the tests itself, as under torchrun, which takes longer: {reason}, and ranks that are forked "
            "after that would share what came of it."
        )
    return ""
