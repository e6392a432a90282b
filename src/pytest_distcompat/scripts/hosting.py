"""Runs a launcher that is not ours, watches the ranks that it starts, and says how they ended: one verdict from all.

The verdict is put together by ``launch.ending``, as for ranks of our own. What differs: who starts the ranks is unknown, so
they announce themselves (``hosted_rank``); their exit codes are the launcher's to know, so they are read from torchrun's
report, or from what the ranks left; and the launcher itself can fail.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from pytest_distcompat import clock
from pytest_distcompat.launch import loopback
from pytest_distcompat.launch.cold import ENDED, FAILURE
from pytest_distcompat.launch.ending import Ending, conclude, exit_name
from pytest_distcompat.launch.files import CRASH
from pytest_distcompat.launch.process import alive, await_end, await_exit, descendants, kill, kill_and_wait, kill_named
from pytest_distcompat.launch.request import Request, read_end, read_events
from pytest_distcompat.launch.watchdog import Watchdog

#: How long a launcher may take to notice that its ranks are gone, and ranks to leave once their launcher has.
PATIENCE = 5.0
#: How long helpers of Python's own (resource trackers) may take to notice that nobody needs them.
TIDY = 1.0
#: Bytes of a launcher's output that are looked through, and lines of it that are shown.
READ, SHOWN = 400_000, 60

#: How faulthandler calls the signal that ended a process.
_FATAL = {"Segmentation fault": -11, "Aborted": -6, "Bus error": -7, "Floating": -8, "Illegal instruction": -4}


@dataclass(frozen=True)
class Hosted:
    """A command to be run on ``world_size`` ranks, for ``timeout`` seconds at most; ``name`` is what messages call it."""

    name: str
    line: Sequence[str]
    environment: Mapping[str, str]
    world_size: int
    directory: Path
    timeout: float
    cwd: Path
    reproduce: str

    def run(self) -> Ending:
        """Start it, wait until it ended or was ended; never raises for what it does."""
        # A launcher tries for minutes, and then says what it could not connect to.
        if problem := loopback.problem():
            return conclude(self.directory, self.world_size, None, launch_error=problem)
        supervisor = _Supervisor(self)
        try:
            return _watch(self, supervisor)
        finally:
            supervisor.close()


class _Supervisor:
    """The process below which the launcher and all its ranks are, see ``supervisor``."""

    def __init__(self, hosted: Hosted) -> None:
        directory = hosted.directory
        self.status = directory / "launcher.json"
        self.output = directory / "launcher.log"
        wanted = {
            "command": list(hosted.line),
            "environment": dict(hosted.environment),
            "cwd": str(hosted.cwd),
            "output": str(self.output),
            "status": str(self.status),
        }
        path = directory / "wanted.json"
        path.write_text(json.dumps(wanted), encoding="utf-8")
        with (directory / "supervisor.log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "pytest_distcompat.scripts.supervisor", str(path)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                # Ctrl-C is for pytest, which then lets go.
                start_new_session=True,
            )

    def ended(self) -> Mapping[str, Any] | None:
        """How the launcher ended; None while it runs."""
        if self.status.exists():
            found: dict[str, Any] = json.loads(self.status.read_text(encoding="utf-8"))
            return found
        if self._process.poll() is not None:
            said = read_end(self.output.with_name("supervisor.log"), READ)
            died = f"the process that ran it died ({exit_name(self._process.returncode)})"
            return {"code": None, "problem": f"{died} {said}".rstrip()}
        return None

    def below(self) -> list[psutil.Process]:
        """What runs: the launcher, its ranks, and what they started."""
        return [process for process in descendants(self._process.pid) if alive(process.pid)]

    def close(self) -> None:
        """Kill all that still runs."""
        kill(self.below())
        assert self._process.stdin is not None
        self._process.stdin.close()
        if not await_exit(self._process, PATIENCE):
            kill_and_wait(self._process)


class _Deaths:
    """When each rank was first seen gone: one that is killed cannot tell."""

    def __init__(self, hosted: Hosted) -> None:
        self._hosted = hosted
        self.at: dict[int, float] = {}
        self.pids: dict[int, int] = {}

    def look(self) -> None:
        for rank in range(self._hosted.world_size):
            if rank not in self.pids:
                said = read_events(self._hosted.directory, rank)
                if said and said[0]["event"] == "start":
                    self.pids[rank] = int(said[0]["pid"])
            if rank in self.pids and rank not in self.at and not alive(self.pids[rank]):
                self.at[rank] = clock.now()


def _watch(hosted: Hosted, supervisor: _Supervisor) -> Ending:
    watch = Watchdog(Request("", {}, hosted.world_size, str(hosted.directory), hosted.timeout))
    deaths = _Deaths(hosted)
    acted: float | None = None
    while (ended := supervisor.ended()) is None:
        clock.sleep(0.02)
        watch.check()
        deaths.look()
        if watch.acted:
            acted = acted or clock.now()
            if clock.now() > acted + PATIENCE:
                break
    outlived = _outlived(supervisor, deaths, watch)
    left_over = _clear_up(supervisor, watch)
    deaths.look()
    text = read_end(supervisor.output, READ)
    first = FAILURE.search(text, max(0, text.find("Root Cause")))
    codes = [_exit_code(hosted, rank, text, deaths.pids.get(rank)) for rank in range(hosted.world_size)]
    known: dict[str, Any] = {
        "timed_out": watch.timed_out,
        "ended_by_us": [*watch.ended_by_us, *outlived],
        "first": int(first.group(1)) if first else None,
        "ended_at": [deaths.at.get(rank) for rank in range(hosted.world_size)],
        "seconds": clock.now() - watch.began,
        "timeout": hosted.timeout,
        "environment": hosted.environment,
        "left_over": tuple(left_over),
        "command": hosted.reproduce,
    }
    ending = conclude(hosted.directory, hosted.world_size, codes, **known)
    problem = _problem(hosted, ending, ended, outlived, text)
    if problem:
        ending = conclude(hosted.directory, hosted.world_size, codes, launch_error=problem, **known)
    return ending


def _outlived(supervisor: _Supervisor, deaths: _Deaths, watch: Watchdog) -> list[int]:
    """Ranks that run on though their launcher is gone. They get a moment to leave, and are then killed."""
    await_end(supervisor.below(), TIDY if not watch.acted else 0.0)
    deaths.look()
    return [rank for rank, pid in deaths.pids.items() if alive(pid) and rank not in watch.ended_by_us]


def _clear_up(supervisor: _Supervisor, watch: Watchdog) -> list[str]:
    """Kill what is left below the supervisor; who it was, of a run that was not ended by us."""
    names = kill_named(supervisor.below())
    return [] if watch.acted else names


def _exit_code(hosted: Hosted, rank: int, text: str, pid: int | None) -> int | None:
    """As torchrun reports it, or as the rank or the signal that ended it left it; None if nobody knows."""
    reported = {int(one): int(code) for one, code in FAILURE.findall(text)}
    if rank in reported:
        return reported[rank]
    if str(pid) in ENDED.findall(text):
        return -15
    for event in read_events(hosted.directory, rank):
        if event["event"] == "exit":
            return int(event["code"])
    fault = read_end(hosted.directory / f"rank-{rank}.fault", READ)
    for name, code in _FATAL.items():
        if f"{CRASH}{name}" in fault:
            return code
    return -15 if read_end(hosted.directory / f"rank-{rank}.ended", READ) else None


def _problem(
    hosted: Hosted, ending: Ending, ended: Mapping[str, Any] | None, outlived: Sequence[int], text: str
) -> str:
    """What went wrong that is no rank's: the launcher's failure, a failed probe in another process, ranks too many or none.

    The last line is the headline; the launcher's last output stands before it.
    """
    code = ended["code"] if ended else None
    headline = ""
    failed = sorted(hosted.directory.glob("probe-*.failed"))
    extra = _ranks(hosted.directory) - set(range(hosted.world_size))
    if failed:
        text = failed[0].read_text(encoding="utf-8")
        headline = "the probe failed in a process of the run"
    elif ended and ended["problem"]:
        headline = f"{hosted.name} could not be run: {ended['problem']}"
    elif code is not None and code < 0:
        headline = f"{hosted.name} was killed by {exit_name(code)}"
    elif extra:
        told = f"rank {', '.join(map(str, sorted(extra)))} announced itself too"
        headline = f"{told}; expected {hosted.world_size} ranks"
    elif not _ranks(hosted.directory):
        late = f"time limit of {hosted.timeout:g} s" if ending.timed_out else f"{hosted.name} ended ({exit_name(code)})"
        headline = (
            f"{late}, and no process announced itself as a rank: none had RANK in its environment or made a process group "
            "(is Python started with -E, -I or -S, or without its environment?)"
        )
    elif outlived and not code:
        headline = f"{hosted.name} ended ({exit_name(code)}) while rank {', '.join(map(str, outlived))} still ran"
    elif code and not ending.failed:
        headline = f"all ranks ended well, but {hosted.name} exited with code {code}"
    if not headline:
        return ""
    shown = "\n".join(text.rstrip().splitlines()[-SHOWN:])
    return f"last output of {hosted.name}:\n{shown}\n\n{headline}" if shown else headline


def _ranks(directory: Path) -> set[int]:
    found = (re.fullmatch(r"rank-(\d+)\.jsonl", path.name) for path in directory.glob("rank-*.jsonl"))
    return {int(match.group(1)) for match in found if match}
