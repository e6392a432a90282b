"""The cold launcher, as a cross-check: the same work through the ``torchrun`` command, without anything warm."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from pytest_distcompat import clock
from pytest_distcompat.events import pids_of
from pytest_distcompat.launch import loopback
from pytest_distcompat.launch.ending import Ending
from pytest_distcompat.launch.launcher import Launcher
from pytest_distcompat.launch.process import descendants, kill, kill_and_wait, on_device
from pytest_distcompat.launch.request import Request, Warmth, interpreter
from pytest_distcompat.launch.reused_ranks import Reuse
from pytest_distcompat.launch.watchdog import Watchdog

#: A failed rank in torchrun's final report.
FAILURE = re.compile(r"rank\s+:\s+(\d+)\s+\(local_rank.*?exitcode\s+:\s+(-?\d+)", re.DOTALL)
#: The process of a rank that torchrun ended because another one failed.
ENDED = re.compile(r"Sending process (\d+) closing signal SIGTERM")


class TorchrunLauncher(Launcher):
    """A launcher that starts ``python -m torch.distributed.run`` for each run."""

    def __init__(self, warmth: Warmth, *, device: str = "cpu") -> None:
        self._warmth = warmth
        self._device = device
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, request: Request, reuse: Reuse | None = None) -> Ending:  # noqa: ARG002 - the launchers' protocol
        """Start the ranks, and wait until they ended or were ended; never raises for what the ranks do."""
        problem = loopback.problem()
        if problem:
            return Ending.not_launched(request.world_size, problem)
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
        # Standalone: the kernel chooses the port. Before torch 2.13 the default was 29500 for every run.
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
        give_up_at: float | None = None
        while self._process.poll() is None:
            clock.sleep(0.02)
            watch.check()
            if watch.acted:
                give_up_at = give_up_at or clock.now() + 5.0
                if clock.now() > give_up_at:
                    break
        text = output.read_text(encoding="utf-8", errors="replace")
        failed = self._process.returncode != 0
        self.close()
        codes = {int(rank): int(code) for rank, code in FAILURE.findall(text)}
        first = FAILURE.search(text, max(0, text.find("Root Cause")))
        # torchrun does not list all ranks that it ended itself in some versions.
        pids, ended = pids_of(watch.logs.read()), {int(pid) for pid in ENDED.findall(text)}
        exit_codes = [codes.get(rank, -15 if pids.get(rank) in ended else 0) for rank in range(request.world_size)]
        started = any(Path(request.directory).glob("rank-*.jsonl"))
        return watch.conclude(
            exit_codes,
            first=int(first.group(1)) if first else None,
            launch_error="" if started or not failed else text[-4000:],
            command=request.command(),
        )

    def close(self) -> None:
        """Kill torchrun and its ranks, if they still run."""
        if self._process is not None:
            if self._process.poll() is None:
                kill(descendants(self._process.pid))
            kill_and_wait(self._process)
            self._process = None
