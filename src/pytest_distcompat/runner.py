"""(driver, cell, scenario) -> Trace. Each distinct life runs once, whoever asks, in however many xdist workers."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock

from pytest_distcompat.cell import Cell
from pytest_distcompat.launch import Ending, Launcher, Request
from pytest_distcompat.scenario import Life, Scenario
from pytest_distcompat.trace import LifeEnd, LifeTrace, Moment, Trace

_DONE = "life.json"


class Runner:
    """Runs lives and keeps what they left in ``store``, a directory that all xdist workers of a session share."""

    def __init__(
        self, store: Path, launcher: Launcher, *, device: str, timeout: float, notice: Callable[[str], None] = print
    ) -> None:
        self.store = store
        self._launcher = launcher
        self._device = device
        self._timeout = timeout
        self._notice = notice

    def trace(self, driver: str, cell: Cell, scenario: Scenario) -> Trace:
        """The trace of a scenario; lives that another check already needed are read, not run again."""
        lives: list[LifeTrace] = []
        notes: dict[str, str] = {}
        for life in scenario.lives:
            before = {done.name: done for done in lives}
            broken = before[life.after].end if life.after else None
            if broken is not None:
                lives.append(LifeTrace(life.name, cell.world_size, (), end=broken))
                continue
            trace, command = self._life(driver, cell, life)
            lives.append(trace)
            notes[life.name] = command
        return dataclasses.replace(Trace.of(driver, lives), notes=notes)

    def _life(self, driver: str, cell: Cell, life: Life) -> tuple[LifeTrace, str]:
        directory = self.store / self._key(driver, cell, life.name)
        done = directory / _DONE
        self.store.mkdir(parents=True, exist_ok=True)
        # Released by the operating system if its holder dies, and then the next one runs the life again.
        with FileLock(f"{directory}.lock"):
            if not done.exists():
                self._run(driver, cell, life, directory)
            data = json.loads(done.read_text(encoding="utf-8"))
        return _life_from_json(data["trace"]), data["command"]

    def _run(self, driver: str, cell: Cell, life: Life, directory: Path) -> None:
        saved_by = life.after or life.name
        checkpoint = self.store / self._key(driver, cell, saved_by) / "checkpoint"
        # A life that was broken off with its pytest process left logs, which ranks would append to.
        shutil.rmtree(directory, ignore_errors=True)
        checkpoint.mkdir(parents=True, exist_ok=True)
        request = Request(
            target="pytest_distcompat.worker:run",
            payload={
                "driver": driver,
                "cell": cell.id,
                "device": self._device,
                "life": dataclasses.asdict(life),
                "checkpoint": str(checkpoint),
            },
            world_size=cell.world_size,
            directory=str(directory),
            timeout=self._timeout,
        )
        ending = self._launcher.run(request)
        if ending.notice:
            self._notice(ending.notice)
        trace = life_trace(life.name, ending)
        data = {"trace": dataclasses.asdict(trace), "command": ending.command, "seconds": ending.seconds}
        waiting = directory / f"{_DONE}.{os.getpid()}"
        waiting.write_text(json.dumps(data), encoding="utf-8")
        waiting.rename(directory / _DONE)

    def _key(self, driver: str, cell: Cell, life: str) -> str:
        """A directory name that tells what it holds, with a hash since drivers' names may hold anything."""
        text = f"{driver} {cell.id} {life} {self._device}"
        name = re.sub(r"[^\w.-]", "_", f"{driver}-{cell.id}-{life}")
        return f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def count_lives(store: Path) -> int:
    """How many lives were run into that store so far, all workers together."""
    return sum(1 for _ in store.glob(f"*/{_DONE}"))


def life_trace(name: str, ending: Ending) -> LifeTrace:
    """What the ranks wrote, as a trace; and how the life ended, if not well."""
    moments = tuple(
        Moment.from_json(event["moment"])
        for events in ending.events.values()
        for event in events
        if event["event"] == "moment"
    )
    end = _life_end(ending) if ending.failed else None
    return LifeTrace(name, max(1, len(ending.ranks)), moments, end)


def _life_end(ending: Ending) -> LifeEnd:
    """The place where it ended is where the rank was that failed first; a rank that had finished was nowhere."""
    events = ending.events.get(ending.cause.rank, ()) if ending.cause else ()
    place: Mapping[str, Any] = {}
    if not any(event["event"] == "done" for event in events):
        spoken = [event for event in events if event["event"] in {"verb", "moment"}]
        # Only a verb that was begun and not finished was the place.
        place = spoken[-1] if spoken and spoken[-1]["event"] == "verb" else {}
    return LifeEnd(
        ending.kind, ending.headline(), ending.text(), verb=place.get("verb", ""), index=int(place.get("index", -1))
    )


def _life_from_json(data: Mapping[str, Any]) -> LifeTrace:
    moments = tuple(Moment.from_json(moment) for moment in data["moments"])
    end = LifeEnd(**data["end"]) if data["end"] else None
    return LifeTrace(data["name"], data["world_size"], moments, end)
