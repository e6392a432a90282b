"""Executor ``slurm``: inside an allocation, ``srun`` starts one node agent on each node."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Sequence

from pytest_distcompat.executors._base import Executor


class Slurm(Executor):
    """Node agents of the allocation that pytest runs in, named as Slurm names its nodes."""

    name = "slurm"
    listen = (socket.gethostname(), 0)

    def unsupported_reason(self) -> str | None:
        """Return why there is no allocation to use; None inside one."""
        if "SLURM_JOB_ID" not in os.environ:
            return "there is no allocation (SLURM_JOB_ID is not set); start pytest by sbatch or salloc"
        return None if shutil.which("srun") else "srun is not on the PATH"

    def start(self, join: Sequence[str], nodes: int, token: str) -> list[subprocess.Popen[str]]:
        """Start all agents as one job step, beside the step that pytest may run in."""
        # srun hands its standard input to all tasks: https://slurm.schedmd.com/srun.html, --input.
        srun = [
            "srun",
            "--overlap",
            f"--nodes={nodes}",
            f"--ntasks={nodes}",
            "--ntasks-per-node=1",
            "--kill-on-bad-exit=0",
        ]
        return [self._popen([*srun, *(one for one in join if one != "--with-parent")], token)]
