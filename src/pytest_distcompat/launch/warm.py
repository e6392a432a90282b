"""The default launcher: torchrun's agent in a launcher process of ours, ranks forked from a warm fork server."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from pytest_distcompat.launch.ending import Ending, conclude, exit_name
from pytest_distcompat.launch.process import TEMPORARY, alive, await_end, descendants, kill, on_device
from pytest_distcompat.launch.request import Request, Warmth
from pytest_distcompat.launch.supervise import Watch

#: How long the first imports may take, in seconds; no test's time limit runs meanwhile.
WARM_TIME = 600.0
#: How long the agent may take to notice that its ranks are gone.
AGENT_TIME = 5.0
#: How long until it is told.
AGENT_NOTICES = 0.2

#: What the agent alone gives to ranks, whatever the environment says.
_OF_THE_AGENT = re.compile(
    r"((LOCAL_|GROUP_|ROLE_)?RANK|(LOCAL_|GROUP_|ROLE_)?WORLD_SIZE|ROLE_NAME|MASTER_ADDR|MASTER_PORT"
    r"|TORCHELASTIC_(RESTART_COUNT|MAX_RESTARTS|RUN_ID|USE_AGENT_STORE|ERROR_FILE))"
)


class WarmLauncher:
    """Keeps one launcher process and one fork server, started when first needed, replaced when they break."""

    def __init__(self, warmth: Warmth, *, device: str = "cpu") -> None:
        self._warmth = warmth
        self._device = device
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._buffer = b""
        self._base: dict[str, str] = {}
        self._status: dict[str, Any] | None = None
        self._own: set[int] = set()
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self._told = False

    def warm_up(self) -> None:
        """Start the launcher process, without waiting until it is ready."""
        if self._intact():
            return
        self.close()
        self._directory = tempfile.TemporaryDirectory(prefix="distcompat-")
        warmth = Path(self._directory.name) / "warmth.json"
        wanted = {**dataclasses.asdict(self._warmth), "device": self._device}
        wanted["status"] = f"{self._directory.name}/status.json"
        warmth.write_text(json.dumps(wanted), encoding="utf-8")
        ours, theirs = socket.socketpair()
        self._base = _of_launcher(os.environ, self._device)
        script = "import sys; from pytest_distcompat.launch.server import main; main(int(sys.argv[1]), sys.argv[2])"
        log = (Path(self._directory.name) / "server.log").open("wb")
        with theirs, log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", script, str(theirs.fileno()), str(warmth)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._base,
                # Ctrl-C is for pytest, which then ends us.
                start_new_session=True,
            )
        self._channel, self._buffer, self._status = ours, b"", None

    def _intact(self) -> bool:
        """Whether the launcher process is there, and its fork server too: one whose server died must be replaced."""
        return self._process is not None and self._process.poll() is None and all(alive(pid) for pid in self._own)

    def run(self, request: Request) -> Ending:
        """Start the ranks, wait until they ended or were ended; never raises for what the ranks do."""
        try:
            problem = self.get_warm()
            if problem:
                return conclude(request.directory, request.world_size, None, launch_error=problem)
            return self._run(request)
        except BaseException:
            # Ctrl-C, or pytest-timeout's signal: nothing of ours may live on.
            self.close()
            raise

    def get_warm(self) -> str:
        """Wait until ready; what went wrong, if something did."""
        self.warm_up()
        if self._status is not None:
            return ""
        self._status = self._receive(time.monotonic() + WARM_TIME)
        if self._status is None:
            problem = self._death("while it got ready")
            self.close()
            return problem
        self._own = {process.pid for process in self._below() if alive(process.pid)}
        return ""

    def _run(self, request: Request) -> Ending:
        assert self._process is not None
        assert self._channel is not None
        changes = self._changes(request)
        request = dataclasses.replace(request.from_here(), **changes)
        path = request.write()
        watch = Watch(request)
        # Who died just now is found dead below.
        with contextlib.suppress(BrokenPipeError):
            self._channel.sendall(f"{path}\n".encode())
        acted: float | None = None
        told = False
        while (answer := self._receive(time.monotonic() + 0.1)) is None:
            watch.look()
            if self._process.poll() is not None:
                answer = {"launch_error": self._death("while ranks ran")}
                break
            if watch.acted:
                acted = acted or time.monotonic()
                if time.monotonic() > acted + AGENT_TIME:
                    break
                if not told and time.monotonic() > acted + AGENT_NOTICES:
                    told = True
                    self._process.send_signal(signal.SIGTERM)
        left_over = self._clear_up()
        ending = conclude(
            request.directory,
            request.world_size,
            (answer or {}).get("exit_codes"),
            timed_out=watch.timed_out,
            ended_by_us=watch.ended_by_us,
            first=(answer or {}).get("first"),
            ended_at=(answer or {}).get("ended_at", ()),
            launch_error=(answer or {}).get("launch_error", ""),
            seconds=time.monotonic() - watch.began,
            timeout=request.timeout,
            left_over=tuple(left_over),
            notice=self._notice(),
            command=request.command(),
        )
        if answer is None or "launch_error" in answer:
            self.close()
        return ending

    def _changes(self, request: Request) -> dict[str, Any]:
        """What makes of the launcher process's environment that which torchrun, started now, would give to ranks."""
        now = {**_of_ranks(os.environ, self._device, request.world_size), **request.set}
        names = {name for name in {*now, *self._base} if not _OF_THE_AGENT.fullmatch(name)}
        changed = sorted(name for name in names if now.get(name) != self._base.get(name))
        return {
            "set": {name: now[name] for name in changed if name in now},
            "unset": [name for name in changed if name not in now],
        }

    def _clear_up(self) -> list[str]:
        """Kill what the ranks left running; who they were."""
        left = [process for process in self._below() if process.pid not in self._own and alive(process.pid)]
        names = []
        for process in left:
            with contextlib.suppress(Exception):
                names.append(f"{process.name()} (pid {process.pid})")
        if left:
            kill(left)
        return names

    def _below(self) -> list[psutil.Process]:
        """All processes below the launcher process; none if it is dead, for its number may be another's by now."""
        assert self._process is not None
        return descendants(self._process.pid) if self._process.poll() is None else []

    def _notice(self) -> str:
        """What the user should know once about the fork server."""
        assert self._status is not None
        if self._told or not self._status["unfit"]:
            return ""
        self._told = True
        return (
            f"the fork server cannot be forked from: {self._status['unfit']}. Ranks are started by spawn instead, "
            "seconds slower each. Look for code at import time in a conftest.py or a test module."
        )

    def _receive(self, deadline: float) -> dict[str, Any] | None:
        """The next answer; None when the deadline passes or the other end is gone."""
        assert self._channel is not None
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._channel], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                return None
            try:
                received = self._channel.recv(65536)
            except ConnectionError:
                received = b""
            if not received:
                assert self._process is not None
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(1)
                return None
            self._buffer += received
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _death(self, when: str) -> str:
        """What the launcher process wrote last, and how it died."""
        assert self._directory is not None
        assert self._process is not None
        log = Path(self._directory.name, "server.log").read_text(encoding="utf-8", errors="replace")[-4000:]
        if self._process.poll() is None:
            hangs = "a module or a conftest.py hangs at import"
            return f"{log}\nthe launcher process did not get ready within {WARM_TIME:g} s: {hangs}"
        return f"{log}\nthe launcher process died {when} ({exit_name(self._process.poll())})"

    def close(self) -> None:
        """Kill the launcher process and all below it."""
        if self._process is not None:
            below = self._below()
            # Python's resource tracker unlinks the semaphores of those we kill, and then ends by itself.
            trackers = [process for process in below if _tracks_resources(process)]
            kill(process for process in below if process not in trackers)
            self._process.kill()
            self._process.wait()
            self._process = None
            await_end(trackers, 2.0)
            kill(trackers)
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._directory is not None:
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(Path(self._directory.name, TEMPORARY).read_text(encoding="utf-8"))
            self._directory.cleanup()
            self._directory = None
        self._status = None
        self._own = set()


def _tracks_resources(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return any("multiprocessing.resource_tracker" in part for part in process.cmdline())
    return False


def _of_ranks(now: Mapping[str, str], device: str, world_size: int) -> dict[str, str]:
    """What ranks inherit from the torchrun command, and it from ``now`` (torch/distributed/run.py)."""
    environment = on_device(now, device)
    environment["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
    environment.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    if world_size > 1:
        environment.setdefault("OMP_NUM_THREADS", "1")
    return environment


def _of_launcher(now: Mapping[str, str], device: str) -> dict[str, str]:
    """The launcher process's environment: nothing in it starts CUDA or threads, unless the user asks for threads."""
    environment = _of_ranks(now, device, 1)
    # Keeps OpenMP and OpenBLAS in the fork server from threads, whatever ranks get.
    environment.setdefault("OMP_NUM_THREADS", "1")
    # So that torch.cuda.is_available() asks NVML and leaves the fork server without a CUDA context.
    environment["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    return environment
