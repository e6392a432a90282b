"""Executor ``slurm``: inside an allocation, ``srun`` starts one node agent on each node.

An *executor* starts the agents of a session over several machines (``_base``). The user starts
pytest inside a Slurm job (``sbatch`` or ``salloc``), whose machines become the nodes.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Sequence

from pytest_distcompat.ext.cluster.executors._base import Executor

#: How long Slurm's controller may take to answer, in seconds.
ANSWER_S = 5


class Slurm(Executor):
    """Executor for the job that pytest runs in; nodes have the names that Slurm gives them."""

    name = "slurm"
    # On the interface of the host name, by which other nodes reach this one; 0 is any free port.
    listen = (socket.gethostname(), 0)

    def unsupported_reason(self) -> str | None:
        """Return why there is no allocation to use; None inside one."""
        if "SLURM_JOB_ID" not in os.environ:
            return (
                "there is no allocation (SLURM_JOB_ID is not set); start pytest by sbatch or salloc"
            )
        if shutil.which("srun"):
            return None
        return "srun is not on the PATH"

    def names(self, nodes: int) -> list[str]:
        """Return the first nodes of the allocation."""
        listed = subprocess.run(
            ["scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]],
            check=True,
            capture_output=True,
            text=True,
        )
        return listed.stdout.split()[:nodes]

    def start(self, join: Sequence[str], nodes: int, token: str) -> list[subprocess.Popen[str]]:
        """Start all agents as one job step, beside the step that pytest may run in."""
        sizes = (f"--nodes={nodes}", f"--ntasks={nodes}")
        return [self._srun(join, token, *sizes)]

    def restart(self, join: Sequence[str], name: str, token: str) -> subprocess.Popen[str]:
        """Start one agent, as a job step of its own."""
        return self._srun(join, token, "--nodes=1", "--ntasks=1", f"--nodelist={name}")

    def taken(self) -> str:
        """Return why Slurm takes the nodes away; empty if the job is running on.

        Slurm preempts it, or ends it at its time limit, say.
        """
        job = os.environ["SLURM_JOB_ID"]
        line = ["scontrol", "--oneliner", "show", "job", job]
        try:
            shown = subprocess.run(
                line, check=False, capture_output=True, text=True, timeout=ANSWER_S
            ).stdout
        except subprocess.TimeoutExpired:
            # It is unknown. The nodes that are lost are lost all the same.
            return ""
        # One line of words such as ``JobState=RUNNING``.
        fields = {}
        for word in shown.split():
            name, separator, value = word.partition("=")
            if separator:
                fields[name] = value
        # In the time of grace (GraceTime) a preempted job is still RUNNING.
        if fields.get("PreemptTime", "None") != "None":
            return f"Slurm preempts job {job}"
        state = fields.get("JobState", "RUNNING")
        return "" if state == "RUNNING" else f"Slurm ends job {job} ({state})"

    def _srun(self, join: Sequence[str], token: str, *where: str) -> subprocess.Popen[str]:
        """Start agents by ``srun``, on the nodes that its options ``where`` say."""
        # srun hands its standard input to all tasks: https://slurm.schedmd.com/srun.html, --input.
        # ``--overlap``: other steps of the job may use the same nodes at the same time.
        # ``--kill-on-bad-exit=0``: an agent that fails does not end those of other nodes.
        srun = ["srun", "--overlap", *where, "--ntasks-per-node=1", "--kill-on-bad-exit=0"]
        # Without the option by which an agent ends with its parent process: here the parent is a
        # daemon of Slurm, which ends the agent itself.
        command = [argument for argument in join if argument != "--with-parent"]
        return self._popen([*srun, *command], token)
