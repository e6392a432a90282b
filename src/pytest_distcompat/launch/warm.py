"""The default launcher: torchrun's agent in a launcher process of ours, ranks forked from a warm fork server."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from pytest_distcompat import clock
from pytest_distcompat.launch import environment, loopback
from pytest_distcompat.launch.ending import Ending, conclude
from pytest_distcompat.launch.kept import Keeping, KeptRanks
from pytest_distcompat.launch.launcher_process import LauncherProcess
from pytest_distcompat.launch.request import Request, Warmth
from pytest_distcompat.launch.watchdog import Watchdog

#: How long the agent may take to notice that its ranks are gone.
AGENT_TIME = 5.0
#: How long until it is told.
AGENT_NOTICES = 0.2


class WarmLauncher:
    """Keeps one launcher process and one fork server, started when first needed, replaced when they break."""

    def __init__(self, warmth: Warmth, *, device: str = "cpu") -> None:
        self._warmth = warmth
        self._device = device
        self._process: LauncherProcess | None = None
        self._kept: KeptRanks | None = None
        self._told = False

    def warm_up(self) -> None:
        """Start the launcher process, without waiting until it is ready."""
        if self._process is None or not self._process.intact:
            self._end()
            self._process = LauncherProcess(self._warmth, self._device)

    def get_warm(self) -> str:
        """Wait until ready; what went wrong, if something did."""
        problem = loopback.problem()
        if problem:
            return problem
        self.warm_up()
        assert self._process is not None
        problem = self._process.get_warm()
        if problem:
            self._end()
        return problem

    def run(self, request: Request, keep: Keeping | None = None) -> Ending:
        """Start the ranks, wait until they ended or were ended; never raises for what the ranks do.

        With ``keep`` the ranks may be those of an earlier request, and may wait for the next one.
        """
        try:
            problem = self.get_warm()
            if problem:
                return conclude(request.directory, request.world_size, None, launch_error=problem)
            assert self._process is not None
            if keep is not None:
                return self._share(self._process, request, keep)
            self.retire()
            request = self._brought(request, self._process.base)
            watch = Watchdog(request)
            self._process.send(request)
            return self._conclude(self._process, request, watch, self._wait(self._process, watch))
        except BaseException:
            # Ctrl-C, or pytest-timeout's signal: nothing of ours may live on.
            self._end()
            raise

    @property
    def keeping(self) -> str:
        """The scope of the ranks that wait for a request; empty if there are none."""
        return self._kept.keep.scope if self._kept is not None else ""

    def retire(self) -> str:
        """Have ranks that wait leave, if there are any; what went wrong, if something did."""
        if self._kept is None or self._process is None:
            return ""
        # What goes wrong then is told where the last request's fixtures are, which have as long as it had.
        request = self._kept.asked
        ending = self._leave(self._process, self._kept, request, Watchdog(request, self._kept.files))
        return ending.text() if ending.failed else ""

    def _share(self, process: LauncherProcess, request: Request, keep: Keeping) -> Ending:
        """Have ranks do the request that live on thereafter, if all went well."""
        died = self._died_waiting(process)
        if self.keeping != keep.scope:
            self.retire()
        kept = self._kept
        if kept is None:
            there = environment.of_ranks(os.environ, self._device, request.world_size)
            ranks = self._brought(request, process.base)
            kept = self._kept = KeptRanks(ranks, keep, process.directory / "kept", {**there, **request.set})
            process.send(kept.request)
        request = self._brought(request, kept.environment)
        kept.ask(request)
        watch = Watchdog(request, kept.files)
        answer = self._wait(process, watch, kept)
        if answer is not None or watch.acted:
            self._kept = None
            kept.leave()
            return self._conclude(process, request, watch, answer)
        if keep.last or kept.to_leave:
            return self._leave(process, kept, request, watch)
        ending = self._ended(process, request, watch, {}, notice=died)
        # A child that a rank forked may have failed where the rank went on.
        return self._leave(process, kept, request, watch) if ending.failed else ending

    def _died_waiting(self, process: LauncherProcess) -> str:
        """How ranks that waited for a request came to their end, if they did; whoever asks next is not to blame."""
        if self._kept is None:
            return ""
        self._kept.look()
        if not self._kept.lost:
            return ""
        request = self._kept.request
        ending = self._leave(process, self._kept, request, Watchdog(request))
        return f"between two tests {ending.headline()}; new ranks were started"

    def _leave(self, process: LauncherProcess, kept: KeptRanks, request: Request, watch: Watchdog) -> Ending:
        """The end of ranks that were kept, as the end of that request."""
        self._kept = None
        kept.leave()
        return self._conclude(process, request, watch, self._wait(process, watch), left=kept.to_leave)

    def _brought(self, request: Request, base: Mapping[str, str]) -> Request:
        """The request for ranks that have that environment."""
        wanted = environment.of_ranks(os.environ, self._device, request.world_size)
        return environment.brought_to(wanted, request.from_here(), base)

    def _wait(self, process: LauncherProcess, watch: Watchdog, kept: KeptRanks | None = None) -> dict[str, Any] | None:
        """What the agent answers in the end; None if it does not, or if ranks that are kept all have replied before it."""
        acted: float | None = None
        told = False
        sockets = kept.sockets if kept is not None else []
        while (answer := process.receive(clock.now() + 0.1, sockets)) is None:
            if kept is not None:
                sockets = kept.look()
                if kept.replied:
                    return None
            watch.look()
            if process.dead:
                return {"launch_error": process.death("while ranks ran")}
            if watch.acted:
                acted = acted or clock.now()
                if clock.now() > acted + AGENT_TIME:
                    return None
                if not told and clock.now() > acted + AGENT_NOTICES:
                    told = True
                    process.stop_waiting()
        return answer

    def _conclude(
        self,
        process: LauncherProcess,
        request: Request,
        watch: Watchdog,
        answer: Mapping[str, Any] | None,
        **more: Any,
    ) -> Ending:
        """How the request ended whose ranks are gone."""
        left_over = process.clear_up()
        ending = self._ended(process, request, watch, answer or {}, left_over=tuple(left_over), **more)
        if answer is None or "launch_error" in answer:
            self._end()
        return ending

    def _ended(
        self, process: LauncherProcess, request: Request, watch: Watchdog, answer: Mapping[str, Any], **more: Any
    ) -> Ending:
        more["notice"] = more.get("notice") or self._notice(process, request)
        return conclude(
            request.directory,
            request.world_size,
            answer.get("exit_codes"),
            timed_out=watch.timed_out,
            ended_by_us=watch.ended_by_us,
            ended_since=watch.ended_since,
            first=answer.get("first"),
            ended_at=answer.get("ended_at", ()),
            launch_error=answer.get("launch_error", ""),
            seconds=clock.now() - watch.began,
            timeout=request.timeout,
            command=request.command(),
            files=watch.files,
            **more,
        )

    def _notice(self, process: LauncherProcess, request: Request) -> str:
        """What the user should know once about the fork servers."""
        if self._told:
            return ""
        notice = ""
        if process.unfit:
            notice = (
                f"the fork server cannot be forked from: {process.unfit}. Ranks are started by spawn instead, "
                "seconds slower each. Look for code at import time in a conftest.py or a test module."
            )
        elif missing := [f"{name} ({process.missing[name]})" for name in self._warmth.named if name in process.missing]:
            notice = f"the fork server could not import what it was told to: {', '.join(missing)}"
        elif request.collected and (reason := process.not_shared(request)):
            notice = (
                f"each rank imports the tests itself, as under torchrun, which takes longer: {reason}, and ranks that are forked "
                "after that would share what came of it."
            )
        self._told = bool(notice)
        return notice

    def close(self) -> None:
        """End the launcher process and all below it, once nothing runs there."""
        self._end(farewell=True)

    def _end(self, *, farewell: bool = False) -> None:
        """Kill the launcher process and all below it; with ``farewell`` it may do what is to be done at its end."""
        if self._kept is not None:
            self._kept.leave()
            self._kept = None
            farewell = False
        if self._process is not None:
            self._process.close(farewell=farewell)
            self._process = None
