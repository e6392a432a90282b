"""The cross-check: the very same work through the ``torchrun`` command, cold each time."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from pytest_distcompat import clock
from pytest_distcompat.launch import loopback
from pytest_distcompat.launch.ending import Ending, conclude
from pytest_distcompat.launch.kept import Keeping
from pytest_distcompat.launch.process import descendants, kill, kill_and_wait, on_device
from pytest_distcompat.launch.request import Request, Warmth, interpreter, read_events
from pytest_distcompat.launch.watchdog import Watchdog

#: A failed rank as torchrun's final report shows it.
FAILURE = re.compile(r"rank\s+:\s+(\d+)\s+\(local_rank.*?exitcode\s+:\s+(-?\d+)", re.DOTALL)
#: The process of a rank that torchrun ended because of another.
ENDED = re.compile(r"Sending process (\d+) closing signal SIGTERM")


class TorchrunLauncher:
    """Runs ``python -m torch.distributed.run`` for each run."""

    def __init__(self, warmth: Warmth, *, device: str = "cpu") -> None:
        self._warmth = warmth
        self._device = device
        self._process: subprocess.Popen[bytes] | None = None

    def warm_up(self) -> None:
        """Nothing can be prepared: that is the point."""

    def get_warm(self) -> str:
        """Nothing to wait for."""
        return ""

    #: Each request has ranks of its own.
    keeping = ""

    def retire(self) -> str:
        """Nobody waits."""
        return ""

    def run(self, request: Request, keep: Keeping | None = None) -> Ending:  # noqa: ARG002 - the launchers' protocol
        """Start the ranks, wait until they ended or were ended; never raises for what the ranks do."""
        problem = loopback.problem()
        if problem:
            return conclude(request.directory, request.world_size, None, launch_error=problem)
        try:
            return self._run(request)
        except BaseException:
            self.close()
            raise

    def _run(self, request: Request) -> Ending:
        request = request.from_here()
        path = request.write()
        logs = Path(request.directory) / "logs"
        logs.mkdir(exist_ok=True)
        # Standalone: a port that the kernel chooses. Before torch 2.13 the default was 29500 for everybody.
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(request.world_size)]
        # By itself torchrun starts its ranks without the flags that this interpreter was given.
        rank = ["--no-python", *interpreter(), "-u", "-m", "pytest_distcompat.launch.rank", str(path)]
        command += ["--log-dir", str(logs), "--redirects", "3", *rank]
        watch = Watchdog(request)
        output = Path(request.directory) / "torchrun.log"
        with output.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=on_device(os.environ, self._device),
                start_new_session=True,
                cwd=request.cwd,
            )
        patience: float | None = None
        while self._process.poll() is None:
            clock.sleep(0.02)
            watch.look()
            if watch.acted:
                patience = patience or clock.now() + 5.0
                if clock.now() > patience:
                    break
        text = output.read_text(encoding="utf-8", errors="replace")
        failed = self._process.returncode != 0
        self.close()
        codes = {int(rank): int(code) for rank, code in FAILURE.findall(text)}
        first = FAILURE.search(text, max(0, text.find("Root Cause")))
        exit_codes = [codes.get(rank, _unlisted(request, rank, text)) for rank in range(request.world_size)]
        started = any(Path(request.directory).glob("rank-*.jsonl"))
        return conclude(
            request.directory,
            request.world_size,
            exit_codes,
            timed_out=watch.timed_out,
            ended_by_us=watch.ended_by_us,
            ended_since=watch.ended_since,
            first=int(first.group(1)) if first else None,
            launch_error="" if started or not failed else text[-4000:],
            seconds=clock.now() - watch.began,
            timeout=request.timeout,
            command=request.command(),
        )

    def close(self) -> None:
        """Kill torchrun and its ranks, if they still run."""
        if self._process is not None:
            if self._process.poll() is None:
                kill(descendants(self._process.pid))
            kill_and_wait(self._process)
            self._process = None


def _unlisted(request: Request, rank: int, text: str) -> int:
    """The exit code of a rank that torchrun does not count as failed; some versions leave out those that it ended."""
    pids = {event["pid"] for event in read_events(request.directory, rank) if event["event"] == "start"}
    return -15 if pids & {int(pid) for pid in ENDED.findall(text)} else 0
