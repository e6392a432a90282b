"""Launcher of simulations: one process acts as one rank after the other; no other ranks exist.

With ``--distcompat-simulate 1024`` a suite gets this launcher in place of one that starts ranks
(``substitute.Simulation.launcher``). ``runner`` calls ``run`` with the same requests, and gets an
``Ending``, how the ranks ended. The process, ``fake_ranks``, acts only as ranks that hold different
parts of the model; each writes its log as a real rank does. Of 1024 ranks, two or three have logs,
and only those are in the ending.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from pytest_distcompat import clock
from pytest_distcompat.events import Done, Event, of_kind
from pytest_distcompat.launch.files import read_end
from pytest_distcompat.launch.forensics.conclude import RankProcess, conclude
from pytest_distcompat.launch.forensics.ending import Ending
from pytest_distcompat.launch.launcher import Launcher
from pytest_distcompat.launch.process import on_device
from pytest_distcompat.launch.rank_log import LogReader
from pytest_distcompat.launch.request import Request, unbuffered

#: How much of the end of the process's output is shown, in bytes.
OUTPUT_BYTES = 8000


class SimulatingLauncher(Launcher):
    """A launcher whose runs are performed by one process, ``fake_ranks``."""

    def run(self, request: Request) -> Ending:
        """Run the process to its end or to the time limit; never raises for what the ranks do."""
        # With ``sys.argv``, ``sys.path`` and the working directory of pytest's process.
        request = request.from_here()
        began = clock.now()
        # ``python -u -m MODULE FILE``; the file is the request as JSON.
        command = [
            *unbuffered(),
            "-m",
            "pytest_distcompat.ext.simulation.fake_ranks",
            str(request.write()),
        ]
        output = Path(request.directory) / "simulated.log"
        code = _run_process(command, request, output)
        timed_out = code is None
        if code is None:
            # The process was killed, and so were the ranks that it was.
            code = -signal.SIGKILL
        events = _events_by_rank(request)
        text = read_end(output, OUTPUT_BYTES)
        if not events:
            return Ending.not_launched(
                request.world_size, f"{text}\nthe simulation ended with code {code} before any rank"
            )
        processes = {}
        for rank, rank_events in events.items():
            # The process acted as this rank to its end, whatever it did as a later one.
            if of_kind(Done, rank_events):
                processes[rank] = RankProcess(code=0)
            else:
                processes[rank] = RankProcess(
                    code, ended_by_us=timed_out, ended_at=clock.now(), output=text
                )
        return conclude(
            events,
            processes,
            timed_out=timed_out,
            seconds=clock.now() - began,
            timeout=request.timeout,
            command=" ".join(command),
        )


def _run_process(command: Sequence[str], request: Request, output: Path) -> int | None:
    """Run a command with its output in a file.

    Returns:
        The exit code; None if the process was killed at the request's time limit.
    """
    with output.open("wb") as log:
        try:
            process = subprocess.run(
                command,
                env=on_device(os.environ, "cpu"),
                cwd=request.cwd,
                stdout=log,
                stderr=log,
                timeout=request.timeout,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return None
    return process.returncode


def _events_by_rank(request: Request) -> dict[int, Sequence[Event]]:
    """Return, by rank, the events of the ranks that the process acted as; the others have none."""
    logged = LogReader(request.directory, range(request.world_size)).read()
    return {rank: events for rank, events in logged.items() if events}
