"""Runner: (driver, cell, scenario) -> Trace.

Each distinct run runs once for all checks and xdist workers.
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


@dataclass(eq=False)
class Runner:
    """Runner of a session: runs what checks need, and keeps the results.

    They are in ``store``, a directory that all xdist workers of the session share. ``worker`` is
    the worker of xdist, whose node agents alone have its checkpoints of each node. ``recorders``
    are the extensions' on each rank (``recording``). ``started`` has the directories of the runs
    that this process has started, each with the name of the run.
    """

    store: Path
    launcher: Launcher
    _: KW_ONLY
    device: str
    timeout: float
    notice: Callable[[str], None] = print
    limits: Mapping[str, float] | None = None
    log_level: str = ""
    worker: str = ""
    recorders: tuple[str, ...] = ()
    started: dict[Path, str] = field(default_factory=dict, init=False)
    _decoded: dict[Path, tuple[RunTrace, str]] = field(default_factory=dict, init=False)

    def trace(self, driver: str, cell: Cell, scenario: Scenario) -> Trace:
        """Return the trace of a scenario.

        Runs that another check already needed are read, not run again.
        """
        runs: dict[str, RunTrace] = {}
        notes: dict[str, str] = {}
        wanted = {run.name: run for run in scenario.runs}
        for run in scenario.runs:
            earlier = runs.get(run.after)
            if (
                earlier is not None
                and earlier.end is not None
                and not _saved_everywhere(earlier, run)
            ):
                run_cell = run.cell(cell)
                runs[run.name] = RunTrace(
                    run.name, run_cell.world_size, (), end=earlier.end, cell=run_cell.id
                )
            else:
                runs[run.name], notes[run.name] = self._trace(
                    driver, cell, run, wanted.get(run.after)
                )
        return Trace(driver, runs, notes, dict(self.limits or {}))

    def directories(self, driver: str, cell: Cell, scenario: Scenario) -> dict[Path, str]:
        """Return the directories of a scenario's runs, each with the name of its run."""
        return {self._directory(driver, cell, run): run.name for run in scenario.runs}

    def forget(self, driver: str, cell: Cell, scenario: Scenario) -> None:
        """Discard the stored results of a scenario, so that its runs run again."""
        for run in scenario.runs:
            (self._directory(driver, cell, run) / DONE).unlink(missing_ok=True)

    def _trace(self, driver: str, cell: Cell, run: Run, after: Run | None) -> tuple[RunTrace, str]:
        directory = self._directory(driver, cell, run)
        # A test, or a cleaner of temporary files, may have removed what later runs load.
        if directory not in self._decoded or not (directory / DONE).exists():
            self.store.mkdir(parents=True, exist_ok=True)
            # The operating system releases the lock if its holder dies; the next worker then runs
            # the run again.
            with FileLock(f"{directory}.lock"):
                stored = (directory / DONE).exists()
                self._decoded[directory] = (
                    read_run(directory) if stored else self._run(driver, cell, run, after)
                )
            # The checks of a cell follow one another and read the same runs; runs of earlier cells
            # are not needed again.
            for old in list(self._decoded)[:-DECODED_RUNS_KEPT]:
                del self._decoded[old]
        trace, command = self._decoded[directory]
        return dataclasses.replace(trace, name=run.name), command

    def _run(self, driver: str, cell: Cell, run: Run, after: Run | None) -> tuple[RunTrace, str]:
        directory = self._directory(driver, cell, run)
        self.started[directory] = run.name
        # An interrupted session may have left logs, to which the ranks would append.
        shutil.rmtree(directory, ignore_errors=True)
        save_to = directory / run.directory
        save_to.mkdir(parents=True)
        load_from, export = save_to, directory / "export"
        if after is not None:
            earlier = self._directory(driver, cell, after)
            load_from, export = earlier / after.directory, earlier / "export"
        if run.damage and after is not None:
            # Corrupt a copy: other runs load the same checkpoint.
            shutil.copytree(load_from, save_to, dirs_exist_ok=True)
        run_cell = run.cell(cell)
        names = str(save_to), str(load_from), str(export)
        payload = SuitePayload(
            driver,
            run_cell.id,
            cell.dp_size,
            self.device,
            run,
            *names,
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
            set=_threads(run_cell, self.device),
            # A run that loads a checkpoint uses other interpreters than the run that saved it, rank
            # by rank.
            turn=0 if after is None else 1 if not after.after else 2,
        )
        ending = self.launcher.run(request)
        if ending.notice:
            self.notice(ending.notice)
        trace = run_trace(run.name, ending, run_cell)
        data = {
            "trace": dataclasses.asdict(dataclasses.replace(trace, snapshots=())),
            "command": ending.command,
            "seconds": ending.seconds,
            "ranks": rank_reports(ending),
        }
        partial = directory / f"{DONE}.{os.getpid()}"
        partial.write_text(json.dumps(data), encoding="utf-8")
        partial.rename(directory / DONE)
        return trace, ending.command

    def _directory(self, driver: str, cell: Cell, run: Run) -> Path:
        """Return the directory of a run.

        Two checks share it if the run is in the same cell for as many ranks.
        """
        # A run that loads the checkpoint of another one belongs to that one's cell. The name ends
        # with a hash, since a driver's name may contain any character.
        run_cell = run.cell(cell)
        ranks = f"-of_{cell.dp_size}" if run_cell.world_size != cell.world_size else ""
        origin = f"-after_{cell.id}" if run.after and run_cell != cell else ""
        worker = f"-by_{self.worker}" if self.worker and _has_own_disks(cell, run) else ""
        text = f"{driver}-{run_cell.id}-{run.same_as or run.name}{ranks}{origin}{worker}"
        name = re.sub(r"[^\w.-]", "_", text)
        # A file name has 255 bytes, and a cell's id may be long.
        return (
            self.store
            / f"{name[:180]}-{hashlib.sha256(f'{text} {self.device}'.encode()).hexdigest()[:8]}"
        )


def _has_own_disks(cell: Cell, run: Run) -> bool:
    """Tell whether each machine has files of its own in the run.

    What a run on one rank loads is on the first machine.
    """
    if not cell.own_disks or cell.spread.on_one:
        return False
    return not run.cell(cell).spread.on_one or bool(run.after)


def _threads(cell: Cell, device: str) -> dict[str, str]:
    """Return OMP_NUM_THREADS=1 for a single rank on the CPU, unless the user has set it."""
    # torchrun gives a single rank all cores: on a busy machine threads that wait for one another
    # take a hundred times as long. It must be in the environment, since accelerate would give the
    # rank its cores back.
    is_set = cell.world_size > 1 or device != "cpu" or "OMP_NUM_THREADS" in os.environ
    return {} if is_set else {"OMP_NUM_THREADS": "1"}


def read_run(directory: Path) -> tuple[RunTrace, str]:
    """Return a finished run and the command that repeats it.

    Raises FileNotFoundError for an unfinished one.
    """
    data = json.loads((directory / DONE).read_text(encoding="utf-8"))
    run = decode(RunTrace, data["trace"])
    snapshots = _snapshots(LogReader(directory, range(run.world_size)).read())
    return dataclasses.replace(run, snapshots=snapshots), data["command"]


def _snapshots(events: Mapping[int, Sequence[Event]]) -> tuple[Snapshot, ...]:
    taken = (event for logged in events.values() for event in of_kind(SnapshotTaken, logged))
    return tuple(decode(Snapshot, event.snapshot) for event in taken)


def _saved_everywhere(earlier: RunTrace, run: Run) -> bool:
    """Tell whether a failed run had already saved, on every rank, what the next run loads."""
    action = "export" if "reload" in run.actions else "save"
    return len(earlier.at(action)) == earlier.world_size


def run_trace(name: str, ending: Ending, cell: Cell) -> RunTrace:
    """Return the trace of a run from its ending."""
    # A verdict does not depend on which machines there are: their names are for those who read it.
    end = _run_failure(ending.without_hosts()) if ending.failed else None
    return RunTrace(name, cell.world_size, _snapshots(ending.events), end, cell.id, ending.hosts)


def _run_failure(ending: Ending) -> RunFailure:
    """Return the failure, in the action of the rank that failed first.

    A rank that had finished is in no action.
    """
    events = ending.events.get(ending.cause.rank, ()) if ending.cause else ()
    # Only an action that began and did not finish has failed.
    action = None if of_kind(Done, events) else current_action(events)
    rank = ending.cause.rank if ending.cause and not ending.launch_error else None
    where = (action.action, action.index) if action is not None else ("", -1)
    return RunFailure(ending.kind, ending.headline(), ending.text(), *where, rank=rank)


def rank_reports(ending: Ending) -> list[dict[str, Any]]:
    """Return a report of each rank that failed, the cause first.

    An error of the launch stands before them, as rank None.
    """
    failed = RankEnd(-1, "", ending.headline(), ending.launch_error)
    return [{**_rank_report(failed), "rank": None}] * bool(ending.launch_error) + [
        _rank_report(end) for end in ending.in_order()
    ]


def _rank_report(end: RankEnd) -> dict[str, Any]:
    fields = {name: getattr(end, name) for name in ("rank", "status", "message", "text", "output")}
    collectives = end.wait_state.history() if end.wait_state is not None else ""
    return {
        **fields,
        "stack": without_launcher(end.stack) if end.stack else "",
        "collectives": collectives,
    }
