"""(driver, cell, scenario) -> Trace. Each distinct life runs once, whoever asks, in however many xdist workers."""

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
from pytest_distcompat.scenario import Life, Scenario
from pytest_distcompat.trace import LifeEnd, LifeTrace, Moment, Trace

#: In a life's directory, written last: how it ended. What its ranks saw, which is much more, is in their logs.
DONE = "life.json"
#: How many lives are kept decoded: a train life of 20 steps takes some hundredths of a second to read.
KEPT = 16
#: What a rank of a suite runs.
WORKER = "pytest_distcompat.worker"


class Runner:
    """Runs lives and keeps what they left in ``store``, a directory that all xdist workers of a session share."""

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
        self._decoded: dict[Path, tuple[LifeTrace, str]] = {}

    def trace(self, driver: str, cell: Cell, scenario: Scenario) -> Trace:
        """The trace of a scenario; lives that another check already needed are read, not run again."""
        lives: list[LifeTrace] = []
        notes: dict[str, str] = {}
        wanted = {life.name: life for life in scenario.lives}
        for life in scenario.lives:
            before = {done.name: done for done in lives}
            broken = before[life.after].end if life.after else None
            if broken is not None and not _left(before[life.after], life):
                there = life.cell(cell)
                lives.append(LifeTrace(life.name, there.world_size, (), end=broken, cell=there.id))
                continue
            trace, command = self._life(driver, cell, life, wanted.get(life.after))
            lives.append(trace)
            notes[life.name] = command
        return dataclasses.replace(Trace.of(driver, lives), notes=notes, limits=self._limits)

    def forget(self, driver: str, cell: Cell, scenario: Scenario) -> None:
        """Have the scenario's lives run again, whatever was left of them in the store."""
        for life in scenario.lives:
            (self._directory(driver, cell, life) / DONE).unlink(missing_ok=True)

    def _life(self, driver: str, cell: Cell, life: Life, after: Life | None) -> tuple[LifeTrace, str]:
        directory = self._directory(driver, cell, life)
        if directory not in self._decoded:
            self.store.mkdir(parents=True, exist_ok=True)
            # Released by the operating system if its holder dies, and then the next one runs the life again.
            with FileLock(f"{directory}.lock"):
                over = (directory / DONE).exists()
                self._decoded[directory] = read_life(directory) if over else self._run(driver, cell, life, after)
            # The checks of a cell, one after the other, read the same lives; those of another cell are not asked for again.
            for old in list(self._decoded)[:-KEPT]:
                del self._decoded[old]
        trace, command = self._decoded[directory]
        return dataclasses.replace(trace, name=life.name), command

    def _run(self, driver: str, cell: Cell, life: Life, after: Life | None) -> tuple[LifeTrace, str]:
        directory = self._directory(driver, cell, life)
        # A life that was broken off with its pytest process left logs, which ranks would append to.
        shutil.rmtree(directory, ignore_errors=True)
        own = directory / life.directory
        own.mkdir(parents=True)
        found, exported = own, directory / "export"
        if after is not None:
            earlier = self._directory(driver, cell, after)
            found, exported = earlier / after.directory, earlier / "export"
        if life.damage:
            # Others are still to load what is spoiled here.
            shutil.copytree(found, own, dirs_exist_ok=True)
        there = life.cell(cell)
        request = Request(
            target=f"{WORKER}:run",
            payload={
                "driver": driver,
                "cell": there.id,
                "ranks": cell.world_size,
                "device": self._device,
                "life": dataclasses.asdict(life),
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
        trace = life_trace(life.name, ending, there)
        data = {
            "trace": dataclasses.asdict(dataclasses.replace(trace, moments=())),
            "command": ending.command,
            "seconds": ending.seconds,
            "ranks": told_of_ranks(ending),
        }
        waiting = directory / f"{DONE}.{os.getpid()}"
        waiting.write_text(json.dumps(data), encoding="utf-8")
        waiting.rename(directory / DONE)
        return trace, ending.command

    def _directory(self, driver: str, cell: Cell, life: Life) -> Path:
        """Where a life keeps what it leaves; the same life for two cells is one, if it runs in the same cell for as many ranks.

        One that goes on from another belongs to the other's cell. The name tells what it holds, with a hash since
        drivers' names may hold anything.
        """
        there = life.cell(cell)
        ranks = f"-of_{cell.world_size}" if there.world_size != cell.world_size else ""
        origin = f"-after_{cell.id}" if life.after and there != cell else ""
        text = f"{driver}-{there.id}-{life.same_as or life.name}{ranks}{origin}"
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


def read_life(directory: Path) -> tuple[LifeTrace, str]:
    """A life that is over, and the command that runs it again. Raises FileNotFoundError for one that was broken off."""
    data = json.loads((directory / DONE).read_text(encoding="utf-8"))
    told = data["trace"]
    seen = _moments({rank: read_events(directory, rank) for rank in range(told["world_size"])})
    end = LifeEnd(**told["end"]) if told["end"] else None
    return LifeTrace(**{**told, "moments": seen, "end": end}), data["command"]


def _moments(events: Mapping[int, Sequence[Mapping[str, Any]]]) -> tuple[Moment, ...]:
    return tuple(
        Moment.from_json(event["moment"]) for said in events.values() for event in said if event["event"] == "moment"
    )


def count_lives(store: Path) -> int:
    """How many lives were run into that store so far, all workers together."""
    return sum(1 for _ in store.glob(f"*/{DONE}"))


def _left(earlier: LifeTrace, life: Life) -> bool:
    """Whether a life that ended badly had done on every rank what the next one needs of it."""
    verb = "export" if "reload" in life.verbs else "save"
    return len(earlier.at(verb)) == earlier.world_size


def life_trace(name: str, ending: Ending, cell: Cell) -> LifeTrace:
    """What the ranks wrote, as a trace; and how the life ended, if not well."""
    end = _life_end(ending) if ending.failed else None
    return LifeTrace(name, cell.world_size, _moments(ending.events), end, cell.id)


def _life_end(ending: Ending) -> LifeEnd:
    """The place where it ended is where the rank was that failed first; a rank that had finished was nowhere."""
    events = ending.events.get(ending.cause.rank, ()) if ending.cause else ()
    place: Mapping[str, Any] = {}
    if not any(event["event"] == "done" for event in events):
        spoken = [event for event in events if event["event"] in {"verb", "moment"}]
        # Only a verb that was begun and not finished was the place.
        place = spoken[-1] if spoken and spoken[-1]["event"] == "verb" else {}
    rank = ending.cause.rank if ending.cause and not ending.launch_error else None
    where = {"verb": place.get("verb", ""), "index": int(place.get("index", -1)), "rank": rank}
    return LifeEnd(ending.kind, ending.headline(), ending.text(), **where)


def told_of_ranks(ending: Ending) -> list[dict[str, Any]]:
    """For the reports: each rank that did not end well, the cause first; before them, as rank None, what concerns none alone."""
    failed = RankEnd(-1, "", ending.headline(), ending.launch_error)
    return [{**_told(failed), "rank": None}] * bool(ending.launch_error) + [_told(end) for end in ending.in_order()]


def _told(end: RankEnd) -> dict[str, Any]:
    told = {name: getattr(end, name) for name in ("rank", "status", "message", "text", "output")}
    collectives = end.standing.history() if end.standing is not None else ""
    return {**told, "stack": without_launcher(end.stack) if end.stack else "", "collectives": collectives}
