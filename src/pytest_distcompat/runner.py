"""Runner: has ranks perform the runs that a check needs, and returns what they recorded.

A *run* is one process group from start to end, such as ``train`` or ``resume``. A *scenario* is the
runs that a check needs together. A *cell* is one point of the matrix, such as ``fsdp2-fp32-w2``. A
*driver* is the trainer under test, as a class that the ranks import by its name.

``Check.execute`` calls ``Runner.trace(driver, cell, scenario)`` for each check in each cell; the
checks then judge the returned ``Trace``. Many checks need the same run, and xdist's workers are
several processes. So each distinct run has a directory in the session's store, and runs once for
all of them:

- ``<run>/run.json``: how the run ended. It is written last, so a run with this file is finished.
- ``<run>/``: the ranks' logs with their snapshots, the request, and the checkpoint.
- ``<run>.lock``: locked by the process that runs it, while others wait.

``plugin.session`` makes the ``Runner`` of a pytest session, ``engine`` that of a program.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock

from pytest_distcompat.cell import Cell
from pytest_distcompat.decode import decode
from pytest_distcompat.events import Done, Event, SnapshotTaken, of_kind
from pytest_distcompat.launch.forensics.ending import Ending, RankEnd, current_action
from pytest_distcompat.launch.forensics.stacks import without_launcher
from pytest_distcompat.launch.launcher import Launcher
from pytest_distcompat.launch.rank_log import LogReader
from pytest_distcompat.launch.request import Request
from pytest_distcompat.run_paths import SuitePayload
from pytest_distcompat.scenario import Run, Scenario
from pytest_distcompat.trace import RunFailure, RunTrace, Snapshot, Trace

#: The file of a run's directory that is written last: how the run ended. The snapshots, which are
#: larger, are in the rank logs.
DONE = "run.json"
#: How many runs stay decoded in memory: to read a training of 20 steps takes some hundredths of a
#: second.
DECODED_RUNS_KEPT = 16
#: The module that a rank of a suite runs.
WORKER = "pytest_distcompat.worker"

#: What a run recorded, and the command that repeats it.
TraceAndCommand = tuple[RunTrace, str]


@dataclass(eq=False)
class Runner:
    """Runner of a session: runs what checks need, and keeps the results."""

    #: The directory of the results, which all xdist workers of the session share.
    store: Path
    #: Starts the ranks of a run.
    launcher: Launcher
    _: KW_ONLY
    #: ``cuda`` or ``cpu``.
    device: str
    #: The time limit of a run in seconds.
    timeout: float
    #: Shows the user a line, such as that a run had to be repeated.
    notice: Callable[[str], None] = print
    #: The user's limits of measured numbers: ``{"throughput": 0.9}``.
    limits: Mapping[str, float] | None = None
    #: The log level of pytest for the ranks; empty if none is set.
    log_level: str = ""
    #: The xdist worker, ``gw0``; empty without xdist. On several machines without a shared disk
    #: only its own agents have the checkpoints that its runs wrote.
    worker: str = ""
    #: Functions of extensions that record on each rank (``recording``), as ``module:function``.
    recorders: tuple[str, ...] = ()
    #: The directories of the runs that this process has started -> the names of the runs.
    started: dict[Path, str] = field(default_factory=dict, init=False)
    #: The runs that were read last, by directory.
    _decoded: dict[Path, TraceAndCommand] = field(default_factory=dict, init=False)

    def trace(self, driver: str, cell: Cell, scenario: Scenario) -> Trace:
        """Return the trace of a scenario.

        Runs that another check already needed are read, not run again.
        """
        runs: dict[str, RunTrace] = {}
        # Name of a run -> the command that repeats it.
        notes: dict[str, str] = {}
        wanted = {run.name: run for run in scenario.runs}
        for run in scenario.runs:
            earlier = runs.get(run.after)
            if earlier is not None and _saved_too_little(earlier, run):
                # There is nothing to load, so this run has failed for the same reason.
                run_cell = run.cell(cell)
                runs[run.name] = RunTrace(
                    run.name, run_cell.world_size, (), end=earlier.end, cell=run_cell.id
                )
                continue
            after = wanted.get(run.after)
            trace, command = self._trace(driver, cell, run, after)
            runs[run.name] = trace
            notes[run.name] = command
        limits = dict(self.limits or {})
        return Trace(driver, runs, notes, limits)

    def directories(self, driver: str, cell: Cell, scenario: Scenario) -> dict[Path, str]:
        """Return the directories of a scenario's runs, each with the name of its run."""
        name_by_directory: dict[Path, str] = {}
        for run in scenario.runs:
            directory = self._directory(driver, cell, run)
            name_by_directory[directory] = run.name
        return name_by_directory

    def forget(self, driver: str, cell: Cell, scenario: Scenario) -> None:
        """Discard the stored results of a scenario, so that its runs run again."""
        for run in scenario.runs:
            directory = self._directory(driver, cell, run)
            (directory / DONE).unlink(missing_ok=True)

    def _trace(self, driver: str, cell: Cell, run: Run, after: Run | None) -> TraceAndCommand:
        """Return a run, from memory, from its directory, or by running it now.

        ``after`` is the run whose checkpoint or export it loads; None for none.
        """
        directory = self._directory(driver, cell, run)
        # A test, or a cleaner of temporary files, may have removed what later runs load.
        if directory not in self._decoded or not (directory / DONE).exists():
            self.store.mkdir(parents=True, exist_ok=True)
            # The operating system releases the lock if its holder dies; the next worker then runs
            # the run again.
            with FileLock(f"{directory}.lock"):
                if (directory / DONE).exists():
                    self._decoded[directory] = read_run(directory)
                else:
                    self._decoded[directory] = self._run(driver, cell, run, after)
            # The checks of a cell follow one another and read the same runs; runs of earlier cells
            # are not needed again.
            for old in list(self._decoded)[:-DECODED_RUNS_KEPT]:
                del self._decoded[old]
        trace, command = self._decoded[directory]
        # Two scenarios may have the same run under two names (``Run.same_as``).
        return dataclasses.replace(trace, name=run.name), command

    def _run(self, driver: str, cell: Cell, run: Run, after: Run | None) -> TraceAndCommand:
        """Have ranks perform a run, and write how it ended; the arguments are as in ``_trace``."""
        directory = self._directory(driver, cell, run)
        self.started[directory] = run.name
        # An interrupted session may have left logs, to which the ranks would append.
        shutil.rmtree(directory, ignore_errors=True)
        save_to = directory / run.directory
        save_to.mkdir(parents=True)
        load_from = save_to
        export = directory / "export"
        if after is not None:
            earlier = self._directory(driver, cell, after)
            load_from = earlier / after.directory
            export = earlier / "export"
        if run.damage and after is not None:
            # Corrupt a copy: other runs load the same checkpoint.
            shutil.copytree(load_from, save_to, dirs_exist_ok=True)
        run_cell = run.cell(cell)
        payload = SuitePayload(
            driver,
            run_cell.id,
            cell.dp_size,
            self.device,
            run,
            str(save_to),
            str(load_from),
            str(export),
            log_level=self.log_level,
            own_disks=_has_own_disks(cell, run),
            asking_cell=cell.id,
            recorders=self.recorders,
        )
        request = Request(
            target=f"{WORKER}:run",
            payload=dataclasses.asdict(payload),
            world_size=run_cell.world_size,
            directory=str(directory),
            timeout=self.timeout,
            nodes=run_cell.nodes,
            set=_environment(run_cell, self.device),
            turn=_turn(after),
        )
        # This waits until all ranks have ended, well or not.
        ending = self.launcher.run(request)
        if ending.notice:
            self.notice(ending.notice)
        trace = run_trace(run.name, ending, run_cell)
        _write_done(directory, trace, ending)
        return trace, ending.command

    def _directory(self, driver: str, cell: Cell, run: Run) -> Path:
        """Return the directory of a run: ``torch-fsdp2-fp32-w2-train-1a2b3c4d`` in the store.

        Two checks share it if the run is in the same cell for as many ranks.
        """
        # A run that loads the checkpoint of another one belongs to that one's cell. The name ends
        # with a hash, since a driver's name may contain any character.
        run_cell = run.cell(cell)
        run_name = run.same_as or run.name
        text = f"{driver}-{run_cell.id}-{run_name}"
        if run_cell.world_size != cell.world_size:
            # A reference in one process trains on the batches of so many ranks.
            text += f"-of_{cell.dp_size}"
        if run.after and run_cell != cell:
            text += f"-after_{cell.id}"
        if self.worker and _has_own_disks(cell, run):
            text += f"-by_{self.worker}"
        name = re.sub(r"[^\w.-]", "_", text)
        digest = hashlib.sha256(f"{text} {self.device}".encode()).hexdigest()
        # A file name has 255 bytes, and a cell's id may be long.
        return self.store / f"{name[:180]}-{digest[:8]}"


def _has_own_disks(cell: Cell, run: Run) -> bool:
    """Tell whether each machine has files of its own in the run.

    What a run on one rank loads is on the first machine.
    """
    if not cell.own_disks or cell.spread.on_one:
        return False
    return not run.cell(cell).spread.on_one or bool(run.after)


def _turn(after: Run | None) -> int:
    """Return the turn of a run: which interpreters its ranks are forked from (``launch.forking``).

    A run that loads a checkpoint uses other interpreters than the run that saved it, rank by rank:
    their hash seeds differ, as those of two launches by torchrun do. There are two interpreters, so
    turns alternate: 0 for a run that loads nothing, 1 for one that loads from that, 2 for the next.
    """
    if after is None:
        return 0
    return 2 if after.after else 1


def _environment(cell: Cell, device: str) -> dict[str, str]:
    """Return the variables that ranks of a cell have besides those of this process.

    They are settings of the cell: ``set_env.NAME=VALUE`` in its id.
    """
    return {**_threads(cell, device), **cell.settings("env")}


def _threads(cell: Cell, device: str) -> dict[str, str]:
    """Return OMP_NUM_THREADS=1 for a single rank on the CPU, unless the user has set it."""
    # torchrun gives a single rank all cores: on a busy machine threads that wait for one another
    # take a hundred times as long. It must be in the environment, since accelerate would give the
    # rank its cores back.
    if cell.world_size > 1 or device != "cpu":
        return {}
    if "OMP_NUM_THREADS" in os.environ:
        return {}
    return {"OMP_NUM_THREADS": "1"}


def _write_done(directory: Path, trace: RunTrace, ending: Ending) -> None:
    """Write how a run ended into its directory, which makes the run a finished one.

    The file has the trace without snapshots, which are in the ranks' logs, the command that repeats
    the run, its duration, and a report of each failed rank.
    """
    without_snapshots = dataclasses.replace(trace, snapshots=())
    data = {
        "trace": dataclasses.asdict(without_snapshots),
        "command": ending.command,
        "seconds": ending.seconds,
        "ranks": rank_reports(ending),
    }
    # Written under another name first: a file of the right name is always complete.
    partial = directory / f"{DONE}.{os.getpid()}"
    partial.write_text(json.dumps(data), encoding="utf-8")
    partial.rename(directory / DONE)


def read_run(directory: Path) -> TraceAndCommand:
    """Return a finished run and the command that repeats it.

    Raises FileNotFoundError for an unfinished one.
    """
    text = (directory / DONE).read_text(encoding="utf-8")
    data = json.loads(text)
    run = decode(RunTrace, data["trace"])
    ranks = range(run.world_size)
    logs = LogReader(directory, ranks)
    with_snapshots = dataclasses.replace(run, snapshots=_snapshots(logs.read()))
    return with_snapshots, data["command"]


def _snapshots(events: Mapping[int, Sequence[Event]]) -> tuple[Snapshot, ...]:
    """Return all snapshots in the logs of ranks, given by rank."""
    snapshots: list[Snapshot] = []
    for logged in events.values():
        for event in of_kind(SnapshotTaken, logged):
            snapshots.append(decode(Snapshot, event.snapshot))
    return tuple(snapshots)


def _saved_too_little(earlier: RunTrace, run: Run) -> bool:
    """Tell whether a run failed before it had saved, on every rank, what the next run loads."""
    if earlier.end is None:
        return False
    action = "export" if "reload" in run.actions else "save"
    return len(earlier.at(action)) != earlier.world_size


def run_trace(name: str, ending: Ending, cell: Cell) -> RunTrace:
    """Return the trace of a run from its ending: what the ranks logged, and how they ended."""
    # A verdict does not depend on which machines there are: their names are for those who read it.
    failure = None
    if ending.failed:
        failure = _run_failure(ending.without_hosts())
    snapshots = _snapshots(ending.events)
    return RunTrace(name, cell.world_size, snapshots, failure, cell.id, ending.hosts)


def _run_failure(ending: Ending) -> RunFailure:
    """Return the failure, in the action of the rank that failed first.

    A rank that had finished is in no action; nor is one of a launch that failed itself.
    """
    failure = RunFailure(ending.kind, ending.headline(), ending.text())
    cause = ending.cause
    if cause is None:
        return failure
    if not ending.launch_error:
        failure = dataclasses.replace(failure, rank=cause.rank)
    events = ending.events.get(cause.rank, ())
    action = current_action(events)
    # Only an action that began and did not finish has failed.
    if action is None or of_kind(Done, events):
        return failure
    return dataclasses.replace(failure, action=action.action, index=action.index)


def rank_reports(ending: Ending) -> list[dict[str, Any]]:
    """Return a report of each rank that failed, the cause first, for the session's report.

    An error of the launch stands before them, as rank None. ``_rank_report`` has the keys.
    """
    reports: list[dict[str, Any]] = []
    if ending.launch_error:
        launch = RankEnd(-1, "", ending.headline(), ending.launch_error)
        reports.append({**_rank_report(launch), "rank": None})
    for end in ending.in_order():
        reports.append(_rank_report(end))
    return reports


def _rank_report(end: RankEnd) -> dict[str, Any]:
    """Return how one rank ended, as JSON: status, message, output, stack, open collectives.

    Texts are empty where nothing is known.
    """
    stack = ""
    if end.stack:
        stack = without_launcher(end.stack)
    collectives = ""
    if end.wait_state is not None:
        collectives = end.wait_state.history()
    return {
        "rank": end.rank,
        "status": end.status,
        "message": end.message,
        "text": end.text,
        "output": end.output,
        "stack": stack,
        "collectives": collectives,
    }
