"""(driver, cell, scenario) -> Trace. Each distinct run runs once, whoever asks, in however many xdist workers."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock

from pytest_distcompat.cell import Cell
from pytest_distcompat.launch import Ending, Launcher, RankEnd, Request
from pytest_distcompat.launch.request import read_events
from pytest_distcompat.launch.stacks import without_launcher
from pytest_distcompat.scenario import Run, Scenario
from pytest_distcompat.trace import RunFailure, RunTrace, Snapshot, Trace

#: In a run's directory, written last: how it ended. What its ranks saw, which is much more, is in their logs.
DONE = "run.json"
#: How many runs are kept decoded: a train run of 20 steps takes some hundredths of a second to read.
KEPT = 16
#: What a rank of a suite runs.
WORKER = "pytest_distcompat.worker"


class Runner:
    """Runs runs and keeps what they left in ``store``, a directory that all xdist workers of a session share."""

    def __init__(
        self,
        store: Path,
        launcher: Launcher,
        *,
        device: str,
        timeout: float,
        notice: Callable[[str], None] = print,
        limits: Mapping[str, float] | None = None,
    ) -> None:
        self.store = store
        self._launcher = launcher
        self._device = device
        self._timeout = timeout
        self._notice = notice
        self._limits = dict(limits or {})
        self._decoded: dict[Path, tuple[RunTrace, str]] = {}

    def trace(self, driver: str, cell: Cell, scenario: Scenario) -> Trace:
        """The trace of a scenario; runs that another check already needed are read, not run again."""
        runs: list[RunTrace] = []
        notes: dict[str, str] = {}
        wanted = {run.name: run for run in scenario.runs}
        for run in scenario.runs:
            before = {done.name: done for done in runs}
            broken = before[run.after].end if run.after else None
            if broken is not None and not _left(before[run.after], run):
                there = run.cell(cell)
                runs.append(RunTrace(run.name, there.world_size, (), end=broken, cell=there.id))
                continue
            trace, command = self._trace(driver, cell, run, wanted.get(run.after))
            runs.append(trace)
            notes[run.name] = command
        return dataclasses.replace(Trace.of(driver, runs), notes=notes, limits=self._limits)

    def forget(self, driver: str, cell: Cell, scenario: Scenario) -> None:
        """Have the scenario's runs run again, whatever was left of them in the store."""
        for run in scenario.runs:
            (self._directory(driver, cell, run) / DONE).unlink(missing_ok=True)

    def _trace(self, driver: str, cell: Cell, run: Run, after: Run | None) -> tuple[RunTrace, str]:
        directory = self._directory(driver, cell, run)
        if directory not in self._decoded:
            self.store.mkdir(parents=True, exist_ok=True)
            # Released by the operating system if its holder dies, and then the next one runs the run again.
            with FileLock(f"{directory}.lock"):
                over = (directory / DONE).exists()
                self._decoded[directory] = read_run(directory) if over else self._run(driver, cell, run, after)
            # The checks of a cell, one after the other, read the same runs; those of another cell are not asked for again.
            for old in list(self._decoded)[:-KEPT]:
                del self._decoded[old]
        trace, command = self._decoded[directory]
        return dataclasses.replace(trace, name=run.name), command

    def _run(self, driver: str, cell: Cell, run: Run, after: Run | None) -> tuple[RunTrace, str]:
        directory = self._directory(driver, cell, run)
        # a run that was broken off with its pytest process left logs, which ranks would append to.
        shutil.rmtree(directory, ignore_errors=True)
        own = directory / run.directory
        own.mkdir(parents=True)
        found, exported = own, directory / "export"
        if after is not None:
            earlier = self._directory(driver, cell, after)
            found, exported = earlier / after.directory, earlier / "export"
        if run.damage:
            # Others are still to load what is spoiled here.
            shutil.copytree(found, own, dirs_exist_ok=True)
        there = run.cell(cell)
        request = Request(
            target=f"{WORKER}:run",
            payload={
                "driver": driver,
                "cell": there.id,
                "ranks": cell.world_size,
                "device": self._device,
                "run": dataclasses.asdict(run),
                "save_to": str(own),
                "load_from": str(found),
                "export": str(exported),
            },
            world_size=there.world_size,
            directory=str(directory),
            timeout=self._timeout,
            set=_threads(there, self._device),
            # What goes on from another run comes from other interpreters than that one, rank by rank.
            turn=0 if after is None else 1 if not after.after else 2,
        )
        ending = self._launcher.run(request)
        if ending.notice:
            self._notice(ending.notice)
        trace = run_trace(run.name, ending, there)
        data = {
            "trace": dataclasses.asdict(dataclasses.replace(trace, snapshots=())),
            "command": ending.command,
            "seconds": ending.seconds,
            "ranks": told_of_ranks(ending),
        }
        waiting = directory / f"{DONE}.{os.getpid()}"
        waiting.write_text(json.dumps(data), encoding="utf-8")
        waiting.rename(directory / DONE)
        return trace, ending.command

    def _directory(self, driver: str, cell: Cell, run: Run) -> Path:
        """Where a run keeps what it leaves; the same run for two cells is one, if it runs in the same cell for as many ranks.

        One that goes on from another belongs to the other's cell. The name tells what it holds, with a hash since
        drivers' names may hold anything.
        """
        there = run.cell(cell)
        ranks = f"-of_{cell.world_size}" if there.world_size != cell.world_size else ""
        origin = f"-after_{cell.id}" if run.after and there != cell else ""
        text = f"{driver}-{there.id}-{run.same_as or run.name}{ranks}{origin}"
        name = re.sub(r"[^\w.-]", "_", text)
        # A file name has 255 bytes, and a cell's id may be long.
        return self.store / f"{name[:180]}-{hashlib.sha256(f'{text} {self._device}'.encode()).hexdigest()[:8]}"


def _threads(cell: Cell, device: str) -> dict[str, str]:
    """What the environment says of threads where torchrun says nothing and the user neither.

    torchrun gives ranks a thread each, and leaves a single one with all cores: on tiny models, and on a machine that does
    something else too, threads that wait for one another take a hundred times as long. Told by the environment, for
    accelerate would give a single rank its cores back.
    """
    said = cell.world_size > 1 or device != "cpu" or "OMP_NUM_THREADS" in os.environ
    return {} if said else {"OMP_NUM_THREADS": "1"}


def read_run(directory: Path) -> tuple[RunTrace, str]:
    """A run that is over, and the command that runs it again. Raises FileNotFoundError for one that was broken off."""
    data = json.loads((directory / DONE).read_text(encoding="utf-8"))
    told = data["trace"]
    seen = _snapshots({rank: read_events(directory, rank) for rank in range(told["world_size"])})
    end = RunFailure(**told["end"]) if told["end"] else None
    return RunTrace(**{**told, "snapshots": seen, "end": end}), data["command"]


def _snapshots(events: Mapping[int, Sequence[Mapping[str, Any]]]) -> tuple[Snapshot, ...]:
    return tuple(
        Snapshot.from_json(event["snapshot"])
        for said in events.values()
        for event in said
        if event["event"] == "snapshot"
    )


def count_runs(store: Path) -> int:
    """How many runs were run into that store so far, all workers together."""
    return sum(1 for _ in store.glob(f"*/{DONE}"))


def _left(earlier: RunTrace, run: Run) -> bool:
    """Whether a run that ended badly had done on every rank what the next one needs of it."""
    action = "export" if "reload" in run.actions else "save"
    return len(earlier.at(action)) == earlier.world_size


def run_trace(name: str, ending: Ending, cell: Cell) -> RunTrace:
    """What the ranks wrote, as a trace; and how the run ended, if not well."""
    end = _run_failure(ending) if ending.failed else None
    return RunTrace(name, cell.world_size, _snapshots(ending.events), end, cell.id)


def _run_failure(ending: Ending) -> RunFailure:
    """The place where it ended is where the rank was that failed first; a rank that had finished was nowhere."""
    events = ending.events.get(ending.cause.rank, ()) if ending.cause else ()
    place: Mapping[str, Any] = {}
    if not any(event["event"] == "done" for event in events):
        spoken = [event for event in events if event["event"] in {"action", "snapshot"}]
        # Only an action that was begun and not finished was the place.
        place = spoken[-1] if spoken and spoken[-1]["event"] == "action" else {}
    rank = ending.cause.rank if ending.cause and not ending.launch_error else None
    where = {"action": place.get("action", ""), "index": int(place.get("index", -1)), "rank": rank}
    return RunFailure(ending.kind, ending.headline(), ending.text(), **where)


def told_of_ranks(ending: Ending) -> list[dict[str, Any]]:
    """For the reports: each rank that did not end well, the cause first; before them, as rank None, what concerns none alone."""
    failed = RankEnd(-1, "", ending.headline(), ending.launch_error)
    return [{**_told(failed), "rank": None}] * bool(ending.launch_error) + [_told(end) for end in ending.in_order()]


def _told(end: RankEnd) -> dict[str, Any]:
    told = {name: getattr(end, name) for name in ("rank", "status", "message", "text", "output")}
    collectives = end.wait_state.history() if end.wait_state is not None else ""
    return {**told, "stack": without_launcher(end.stack) if end.stack else "", "collectives": collectives}
