"""The default launcher: torchrun's agent in a launcher process of ours, ranks forked from a warm fork server."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from pytest_distcompat.launch.ending import Ending, conclude
from pytest_distcompat.launch.process import descendants, kill
from pytest_distcompat.launch.request import Request, Warmth
from pytest_distcompat.launch.supervise import Watch

#: How long the first imports may take, in seconds; no test's time limit runs meanwhile.
WARM_TIME = 600.0
#: How long the agent may take to notice that its ranks are gone.
AGENT_TIME = 5.0


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
        if self._process is not None and self._process.poll() is None:
            return
        self._directory = tempfile.TemporaryDirectory(prefix="distcompat-")
        warmth = Path(self._directory.name) / "warmth.json"
        wanted = {**dataclasses.asdict(self._warmth), "status": f"{self._directory.name}/status.json"}
        warmth.write_text(json.dumps(wanted), encoding="utf-8")
        ours, theirs = socket.socketpair()
        self._base = dict(os.environ)
        script = "import sys; from pytest_distcompat.launch.server import main; main(int(sys.argv[1]), sys.argv[2])"
        log = (Path(self._directory.name) / "server.log").open("wb")
        with theirs, log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", script, str(theirs.fileno()), str(warmth)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_environment(self._base, self._device),
                # Ctrl-C is for pytest, which then ends us.
                start_new_session=True,
            )
        self._channel, self._buffer, self._status = ours, b"", None

    def run(self, request: Request) -> Ending:
        """Start the ranks, wait until they ended or were ended; never raises for what the ranks do."""
        try:
            problem = self._get_warm()
            if problem:
                return conclude(request.directory, request.world_size, None, launch_error=problem)
            return self._run(request)
        except BaseException:
            # Ctrl-C, or pytest-timeout's signal: nothing of ours may live on.
            self.close()
            raise

    def _get_warm(self) -> str:
        self.warm_up()
        if self._status is not None:
            return ""
        self._status = self._receive(time.monotonic() + WARM_TIME)
        if self._status is None:
            problem = "the launcher process died while it got ready:\n" + self._server_log()
            self.close()
            return problem
        assert self._process is not None
        self._own = {child.pid for child in descendants(self._process.pid)}
        return ""

    def _run(self, request: Request) -> Ending:
        assert self._process is not None
        assert self._channel is not None
        request = dataclasses.replace(request, **self._changes(), cwd=request.cwd or str(Path.cwd()))
        path = request.write()
        watch = Watch(request)
        self._channel.sendall(f"{path}\n".encode())
        patience: float | None = None
        while (answer := self._receive(time.monotonic() + 0.1)) is None:
            watch.look()
            if self._process.poll() is not None:
                answer = {"launch_error": "the launcher process died:\n" + self._server_log()}
                break
            if watch.acted:
                patience = patience or time.monotonic() + AGENT_TIME
                if time.monotonic() > patience:
                    break
        left_over = self._clear_up(request)
        ending = conclude(
            request.directory,
            request.world_size,
            (answer or {}).get("exit_codes"),
            timed_out=watch.timed_out,
            ended_by_us=watch.ended_by_us,
            launch_error=(answer or {}).get("launch_error", ""),
            seconds=time.monotonic() - watch.began,
            timeout=request.timeout,
            left_over=tuple(left_over),
            notice=self._notice(),
            command=request.command(),
        )
        if answer is None or "exit_codes" not in answer:
            self.close()
        return ending

    def _changes(self) -> dict[str, Any]:
        """What this process changed in its environment since the launcher process was started."""
        now = dict(os.environ)
        changed = {name: value for name, value in now.items() if self._base.get(name) != value}
        changed.pop("PYTEST_CURRENT_TEST", None)
        return {"set": changed, "unset": [name for name in self._base if name not in now]}

    def _clear_up(self, request: Request) -> list[str]:
        """Kill what the ranks left running; who they were."""
        assert self._process is not None
        left = descendants(self._process.pid, keep=self._own)
        names = []
        for process in left:
            with contextlib.suppress(Exception):
                names.append(f"{process.name()} (pid {process.pid})")
        if left:
            kill(left)
        return names

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

    def _server_log(self) -> str:
        assert self._directory is not None
        return Path(self._directory.name, "server.log").read_text(encoding="utf-8", errors="replace")[-4000:]

    def close(self) -> None:
        """Kill the launcher process and all below it."""
        if self._process is not None:
            kill(descendants(self._process.pid))
            self._process.kill()
            self._process.wait()
            self._process = None
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None
        self._status = None


def _environment(base: dict[str, str], device: str) -> dict[str, str]:
    """The launcher process's environment: torchrun's default, and nothing that could start CUDA or threads."""
    environment = dict(base)
    # torchrun sets it for more than one rank; here it also keeps OpenMP and OpenBLAS in the fork server from threads.
    environment.setdefault("OMP_NUM_THREADS", "1")
    # So that torch.cuda.is_available() asks NVML and leaves the fork server without a CUDA context.
    environment["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
        environment.setdefault("DS_ACCELERATOR", "cpu")
    return environment
