"""Host of a foreign launcher: run it, watch the ranks that it starts, and combine their endings.

A foreign launcher is a command that starts ranks by itself, as ``torchrun --nproc-per-node 2
train.py``. ``Hosted(...).run()`` runs one and returns an ``Ending``: how each rank ended. There are
two callers:

- ``torchrun.TorchrunLauncher``, for runs of this package that torchrun starts.
- ``ext/scripts/launching``, for a user's script with torchrun, accelerate or another command.

The ranks are not children of this process. So they announce themselves: each writes its process
number to its log, ``rank-0.jsonl`` (``rank``, or for scripts ``hosted_rank``). Their exit codes are
read from torchrun's final report or from the ranks' files. The launcher itself can fail too: then
``Ending.launch_error`` says how.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import psutil

from pytest_distcompat import clock
from pytest_distcompat.events import Event, Exit, of_kind, pids_of
from pytest_distcompat.launch import loopback
from pytest_distcompat.launch.files import CRASH, read_end
from pytest_distcompat.launch.forensics.ending import Ending, exit_name
from pytest_distcompat.launch.forensics.watchdog import Watchdog
from pytest_distcompat.launch.process import (
    alive,
    await_end,
    await_exit,
    descendants,
    kill,
    kill_and_wait,
)
from pytest_distcompat.launch.request import Request

#: How long a launcher may take to exit after its ranks are gone, and the supervisor after its
#: launcher, in seconds.
EXIT_TIMEOUT_S = 5.0
#: How long ranks and Python's own helpers (resource trackers) may take to exit after their
#: launcher, in seconds.
REMAINDER_TIMEOUT_S = 1.0
#: How many bytes at the end of a launcher's output are searched, and how many lines are shown.
OUTPUT_BYTES_READ, OUTPUT_LINES_SHOWN = 400_000, 60

#: A failed rank in torchrun's final report, which has a paragraph for each:
#:   rank      : 1 (local_rank: 1)
#:   exitcode  : -11 (pid: 4711)
_FAILURE = re.compile(r"rank\s+:\s+(\d+)\s+\(local_rank.*?exitcode\s+:\s+(-?\d+)", re.DOTALL)
#: The line about a rank that torchrun ends because another one failed. It has the process number.
#: Some versions of torchrun do not list such ranks in the report.
_ENDED = re.compile(r"Sending process (\d+) closing signal SIGTERM")
#: The exit code for each signal by faulthandler's name of it. A crashed rank has left a line
#: ``Fatal Python error: Segmentation fault`` in its crash file.
_FATAL: dict[str, int] = {
    "Segmentation fault": -signal.SIGSEGV,
    "Aborted": -signal.SIGABRT,
    "Bus error": -signal.SIGBUS,
    "Floating": -signal.SIGFPE,
    "Illegal instruction": -signal.SIGILL,
}


@dataclass
class Hosted:
    """A launcher's command that starts several ranks, to be run once.

    It runs below a process of ours, the supervisor (``supervisor``), which is an ancestor of the
    launcher and of all its ranks.
    """

    #: What messages call the launcher: ``torchrun``.
    name: str
    #: The command: ``["python", "-m", "torch.distributed.run", "--nproc-per-node", "2", ...]``.
    line: Sequence[str]
    #: All environment variables of the command.
    environment: Mapping[str, str]
    #: The number of ranks that the command starts.
    world_size: int
    #: Where the ranks write their logs, and the launcher its output.
    directory: Path
    #: The time limit in seconds.
    timeout: float
    cwd: Path
    #: The command line with which a user repeats the run by hand.
    reproduce: str
    #: The exit code of a rank of which neither its launcher nor its files say one. torchrun reports
    #: each failed rank, so it is 0 there. With other launchers it is unknown.
    unreported: int | None = None

    def run(self) -> Ending:
        """Run the command, and return how it ended; raise nothing.

        It is killed at the timeout.
        """
        # Without a loopback interface a launcher would try to connect for minutes.
        problem = loopback.problem()
        if problem:
            return Ending.not_launched(self.world_size, problem)
        self._start()
        try:
            return self._watch()
        finally:
            self._close()

    def _start(self) -> None:
        """Start the supervisor, which starts the command."""
        self._status = self.directory / "launcher.json"
        self._output = self.directory / "launcher.log"
        # What the watchdog needs to know of the run. It calls nothing on ranks, so there is no
        # target.
        watched = Request(
            target="",
            payload={},
            world_size=self.world_size,
            directory=str(self.directory),
            timeout=self.timeout,
        )
        self._watchdog = Watchdog(watched)
        #: Rank -> its process number, of the ranks that have announced themselves.
        self._pids: dict[int, int] = {}
        #: When ranks were first seen gone: a rank that is killed cannot log its end.
        self._exited_at: dict[int, float] = {}
        request = {
            "command": list(self.line),
            "environment": dict(self.environment),
            "cwd": str(self.cwd),
            "output": str(self._output),
            "status": str(self._status),
        }
        path = self.directory / "command.json"
        path.write_text(json.dumps(request), encoding="utf-8")
        with (self.directory / "supervisor.log").open("wb") as log:
            self._supervisor = subprocess.Popen(
                [sys.executable, "-m", "pytest_distcompat.launch.supervisor", str(path)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                # Ctrl-C must reach pytest only, which then closes the pipe.
                start_new_session=True,
            )

    def _watch(self) -> Ending:
        """Watch the launcher and its ranks until the launcher has ended; return how all ended."""
        watchdog = self._watchdog
        # ``acted_at`` is infinite until the watchdog has killed the ranks. From then on the
        # launcher gets a few seconds to report and exit.
        status = self._launcher_status()
        while status is None and clock.now() < watchdog.acted_at + EXIT_TIMEOUT_S:
            clock.sleep(0.02)
            watchdog.check()
            self._note_exits()
            status = self._launcher_status()
        # Ranks may end a moment after their launcher. Those that the watchdog has killed are gone.
        remainder_seconds = 0.0 if watchdog.acted else REMAINDER_TIMEOUT_S
        await_end(self._processes(), remainder_seconds)
        self._note_exits()
        # The ranks that still run although their launcher has ended: that is a failure.
        surviving = []
        for rank, pid in self._pids.items():
            if alive(pid) and rank not in watchdog.ended_by_us:
                surviving.append(rank)
        left_over = kill(self._processes())
        self._note_exits()
        output = read_end(self._output, OUTPUT_BYTES_READ)
        events = watchdog.logs.read()
        ranks = range(self.world_size)
        ending = watchdog.conclude(
            [self._exit_code(rank, events[rank], output) for rank in ranks],
            also_ended=surviving,
            first=_root_cause(output),
            ended_at=[self._exited_at.get(rank) for rank in ranks],
            environment=self.environment,
            left_over=() if watchdog.acted else tuple(left_over),
            command=self.reproduce,
        )
        return replace(ending, launch_error=self._launch_error(ending, status, surviving, output))

    def _launcher_status(self) -> Mapping[str, Any] | None:
        """Return how the launcher ended; None while it runs.

        The supervisor writes it to a file: ``{"code": 1, "problem": ""}``. If the command could not
        be started, ``code`` is None and ``problem`` says why.
        """
        if self._status.exists():
            status = json.loads(self._status.read_text(encoding="utf-8"))
            return cast("dict[str, Any]", status)
        if self._supervisor.poll() is not None:
            output = read_end(self._output.with_name("supervisor.log"), OUTPUT_BYTES_READ)
            reason = f"the process that ran it died ({exit_name(self._supervisor.returncode)})"
            return {"code": None, "problem": f"{reason} {output}".rstrip()}
        return None

    def _processes(self) -> list[psutil.Process]:
        """Return the live processes of the run.

        They are the launcher, its ranks, and the processes that they started.
        """
        processes: list[psutil.Process] = []
        for process in descendants(self._supervisor.pid):
            if alive(process.pid):
                processes.append(process)
        return processes

    def _note_exits(self) -> None:
        """Read the process numbers of new ranks, and note the time for ranks that are gone."""
        if len(self._pids) < self.world_size:
            started = pids_of(self._watchdog.logs.read())
            # The number that a rank had first stays.
            self._pids = {**started, **self._pids}
        for rank, pid in self._pids.items():
            if rank not in self._exited_at and not alive(pid):
                self._exited_at[rank] = clock.now()

    def _close(self) -> None:
        """End what is left, and the supervisor."""
        kill(self._processes())
        assert self._supervisor.stdin is not None
        self._supervisor.stdin.close()
        if not await_exit(self._supervisor, EXIT_TIMEOUT_S):
            kill_and_wait(self._supervisor)

    def _exit_code(self, rank: int, events: Sequence[Event], output: str) -> int | None:
        """Return the exit code of a rank, or ``unreported`` if nothing says it.

        Args:
            rank: The rank.
            events: What it logged. A script's rank logs ``Exit`` when it calls ``sys.exit(3)``.
            output: The launcher's output, with torchrun's report.
        """
        reported: dict[int, int] = {}
        for failed_rank, code in _FAILURE.findall(output):
            reported[int(failed_rank)] = int(code)
        if rank in reported:
            return reported[rank]
        if str(self._pids.get(rank)) in _ENDED.findall(output):
            return -signal.SIGTERM
        exits = of_kind(Exit, events)
        if exits:
            return exits[0].code
        crash = read_end(self.directory / f"rank-{rank}.fault", OUTPUT_BYTES_READ)
        for name, signal_code in _FATAL.items():
            if f"{CRASH}{name}" in crash:
                return signal_code
        # A script's rank writes this file in the handler of SIGTERM.
        if read_end(self.directory / f"rank-{rank}.ended", OUTPUT_BYTES_READ):
            return -signal.SIGTERM
        return self.unreported

    def _launch_error(
        self,
        ending: Ending,
        status: Mapping[str, Any] | None,
        surviving: Sequence[int],
        output: str,
    ) -> str:
        """Return what went wrong apart from the ranks; empty if nothing did.

        The last line says what went wrong, and the lines before it show the launcher's last output.

        Args:
            ending: How the ranks ended.
            status: As ``_launcher_status`` returns it; None if the launcher had to be killed.
            surviving: The ranks that still ran after their launcher had ended.
            output: The launcher's output.
        """
        # Inside of a script, the probe (the code that records the model and the optimizer) leaves
        # such a file with its traceback.
        failed_probes = sorted(self.directory.glob("probe-*.failed"))
        if failed_probes:
            output = failed_probes[0].read_text(encoding="utf-8")
            headline = "the probe failed in a process of the run"
        else:
            headline = self._launch_problem(ending, status, surviving)
        if not headline:
            return ""
        # The last line is the headline of the report.
        last_lines = output.rstrip().splitlines()[-OUTPUT_LINES_SHOWN:]
        shown = "\n".join(last_lines)
        if not shown:
            return headline
        return f"last output of {self.name}:\n{shown}\n\n{headline}"

    def _launch_problem(
        self, ending: Ending, status: Mapping[str, Any] | None, surviving: Sequence[int]
    ) -> str:
        """Return in one line what went wrong with the launcher, or with the number of ranks.

        Empty if nothing did. The arguments are those of ``_launch_error``.
        """
        code = status["code"] if status else None
        if status and status["problem"]:
            return f"{self.name} could not be run: {status['problem']}"
        if code is not None and code < 0:
            return f"{self.name} was killed by {exit_name(code)}"
        wrong_number = self._wrong_number_of_ranks(ending, code)
        if wrong_number:
            return wrong_number
        if surviving and not code:
            ranks = ", ".join(map(str, surviving))
            return f"{self.name} ended ({exit_name(code)}) while rank {ranks} still ran"
        if code and not ending.failed:
            return f"all ranks ended well, but {self.name} exited with code {code}"
        return ""

    def _wrong_number_of_ranks(self, ending: Ending, code: int | None) -> str:
        """Return a line on a wrong number of ranks; empty if the number is right.

        The launcher may have started more ranks than it should (a configuration file with another
        number), or no process has announced itself as a rank.
        """
        announced = self._announced_ranks()
        extra = announced - set(range(self.world_size))
        if extra:
            ranks = ", ".join(map(str, sorted(extra)))
            return f"rank {ranks} announced itself too; expected {self.world_size} ranks"
        if announced:
            return ""
        end = f"{self.name} ended ({exit_name(code)})"
        if ending.timed_out:
            end = f"time limit of {self.timeout:g} s"
        return (
            f"{end}, and no process announced itself as a rank: "
            "none had RANK in its environment or made a process group "
            "(is Python started with -E, -I or -S, or without its environment?)"
        )

    def _announced_ranks(self) -> set[int]:
        """Return the ranks that have a log, whether the run was to have them or not."""
        ranks = set()
        for path in self.directory.glob("rank-*.jsonl"):
            match = re.fullmatch(r"rank-(\d+)\.jsonl", path.name)
            if match:
                ranks.add(int(match.group(1)))
        return ranks


def _root_cause(output: str) -> int | None:
    """Return the rank that failed first, as torchrun's report names it; None without a report."""
    # The report has the first failure below "Root Cause (first observed failure):". Without that
    # title, take the first rank that it names.
    title = max(0, output.find("Root Cause"))
    match = _FAILURE.search(output, title)
    if match is None:
        return None
    return int(match.group(1))
