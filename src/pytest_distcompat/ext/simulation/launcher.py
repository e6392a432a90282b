"""The launcher of simulations: one process takes the part of one rank after the other, and the others do not exist."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from pytest_distcompat import clock
from pytest_distcompat.events import Done, of_kind
from pytest_distcompat.launch.files import read_end
from pytest_distcompat.launch.forensics.ending import Ending, RankProcess, conclude
from pytest_distcompat.launch.launcher import Launcher
from pytest_distcompat.launch.process import on_device
from pytest_distcompat.launch.rank_log import LogReader
from pytest_distcompat.launch.request import Request, unbuffered

#: How much of the process's output is shown, in bytes.
OUTPUT_BYTES = 8000


class SimulatingLauncher(Launcher):
    """A launcher that has ``fake_ranks`` take the part of the ranks of a suite's run that differ."""

    def run(self, request: Request) -> Ending:
        """Run the process to its end or to the time limit; never raises for what the ranks do."""
        request = request.from_here()
        began = clock.now()
        timed_out = False
        command = [
            *unbuffered(),
            "-m",
            "pytest_distcompat.ext.simulation.fake_ranks",
            str(request.write()),
        ]
        output = Path(request.directory) / "simulated.log"
        code = -9
        with output.open("wb") as log:
            try:
                code = subprocess.run(
                    command,
                    env=on_device(os.environ, "cpu"),
                    cwd=request.cwd,
                    stdout=log,
                    stderr=log,
                    timeout=request.timeout,
                    check=False,
                ).returncode
            except subprocess.TimeoutExpired:
                timed_out = True
        logged = LogReader(request.directory, range(request.world_size)).read()
        events = {}
        processes = {}
        text = read_end(output, OUTPUT_BYTES)
        for rank, events_of_rank in logged.items():
            if not events_of_rank:
                # A rank that the process did not come to, or that does as another one does.
                continue
            events[rank] = events_of_rank
            if of_kind(Done, events_of_rank):
                processes[rank] = RankProcess(0)
            else:
                processes[rank] = RankProcess(
                    code, ended_by_us=timed_out, ended_at=clock.now(), output=text
                )
        if not events:
            return Ending.not_launched(
                request.world_size, f"{text}\nthe simulation ended with code {code} before any rank"
            )
        return conclude(
            events,
            processes,
            timed_out=timed_out,
            seconds=clock.now() - began,
            timeout=request.timeout,
            command=" ".join(command),
        )
