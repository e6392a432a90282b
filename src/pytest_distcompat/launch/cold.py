"""The cold launcher, as a cross-check: the same work through the ``torchrun`` command, without anything warm."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from pytest_distcompat.launch.ending import Ending
from pytest_distcompat.launch.hosting import Hosted
from pytest_distcompat.launch.launcher import Launcher
from pytest_distcompat.launch.process import on_device
from pytest_distcompat.launch.request import Request, Warmth, unbuffered
from pytest_distcompat.launch.reused_ranks import Reuse
from pytest_distcompat.launch.warm import WarmLauncher


class TorchrunLauncher(Launcher):
    """A launcher that starts ``python -m torch.distributed.run`` for each run."""

    def __init__(self, warmth: Warmth, *, device: str = "cpu") -> None:  # noqa: ARG002 - the launchers' protocol
        self._device = device

    def run(self, request: Request, reuse: Reuse | None = None) -> Ending:  # noqa: ARG002 - the launchers' protocol
        """Start the ranks, and wait until they ended or were ended; never raises for what the ranks do."""
        request = request.from_here()
        path = request.write()
        logs = Path(request.directory) / "logs"
        logs.mkdir(exist_ok=True)
        # Standalone: the kernel chooses the port. Before torch 2.13 the default was 29500 for every run.
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(request.world_size)]
        # By itself torchrun starts its ranks without the flags that this interpreter was given.
        rank = ["--no-python", *unbuffered(), "-m", "pytest_distcompat.launch.rank", str(path)]
        command += ["--log-dir", str(logs), "--redirects", "3", *rank]
        return Hosted(
            name="torchrun",
            line=command,
            environment=on_device(os.environ, self._device),
            world_size=request.world_size,
            directory=Path(request.directory),
            timeout=request.timeout,
            cwd=Path(request.cwd),
            reproduce=request.command(),
            # torchrun reports each rank that failed.
            unreported=0,
        ).run()


#: The launchers that ``--distcompat-launcher`` names.
LAUNCHERS: dict[str, type[WarmLauncher | TorchrunLauncher]] = {"warm": WarmLauncher, "torchrun": TorchrunLauncher}
