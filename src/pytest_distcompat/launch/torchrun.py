"""Launcher that runs each request by the ``torchrun`` command, without anything warm.

It is a cross-check of the default launcher (``warm``), whose ranks are forked from processes that
have imported torch already: the same requests, each on new interpreters. Sessions use it with
``--distcompat-launcher torchrun``, and for tests that are verified, that is, run a second time.
``LAUNCHERS`` has both launchers by the names that the option takes.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from pytest_distcompat.launch.forensics.ending import Ending
from pytest_distcompat.launch.hosting import Hosted
from pytest_distcompat.launch.launcher import Launcher
from pytest_distcompat.launch.process import on_device, user_environment
from pytest_distcompat.launch.request import Request, Warmth, unbuffered
from pytest_distcompat.launch.warm import WarmLauncher


class TorchrunLauncher(Launcher):
    """A launcher that starts ``python -m torch.distributed.run`` for each run.

    Args:
        warmth: What the warm launcher would prepare. It is ignored.
        device: ``cpu`` or ``cuda``.
        plain: Whether ranks get the user's own environment, as from a torchrun in the user's shell.
            Only the GPUs stay hidden from ranks on the CPU.
    """

    def __init__(self, warmth: Warmth, *, device: str = "cpu", plain: bool = False) -> None:  # noqa: ARG002 - the launchers' protocol
        self._device = device
        self._plain = plain

    def run(self, request: Request) -> Ending:
        """Start the ranks, wait until they ended or were killed, and return how they ended.

        The ``Ending`` has the end of each rank and the events that it logged. What the ranks do
        never raises an exception.
        """
        # With this process's working directory and command line, as a file that each rank reads.
        request = request.from_here()
        path = request.write()
        logs = Path(request.directory) / "logs"
        logs.mkdir(exist_ok=True)
        # Standalone: the kernel chooses the port. Before torch 2.13 the default was 29500 for every
        # run.
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(request.world_size)]
        command += ["--log-dir", str(logs), "--redirects", "3"]
        # ``unbuffered`` returns this interpreter with its flags and ``-u``. By itself torchrun
        # starts ranks as ``python -u``, without the other flags.
        command += ["--no-python", *unbuffered(), "-m", "pytest_distcompat.launch.rank", str(path)]
        # Ranks on the CPU see no GPU.
        environment = on_device(os.environ, self._device)
        if self._plain:
            environment = user_environment(os.environ, self._device)
        return Hosted(
            name="torchrun",
            line=command,
            environment=environment,
            world_size=request.world_size,
            directory=Path(request.directory),
            timeout=request.timeout,
            cwd=Path(request.cwd),
            reproduce=request.command(),
            # The exit code of a rank about which nothing is known: torchrun reports each one that
            # failed, so this one did not.
            unreported=0,
        ).run()


#: The launchers that ``--distcompat-launcher`` names.
LAUNCHERS: dict[str, type[WarmLauncher | TorchrunLauncher]] = {
    "warm": WarmLauncher,
    "torchrun": TorchrunLauncher,
}
