"""Exploration: replay failed walks, make every read-only call, draw new walks, and shrink the first that fails."""

from __future__ import annotations

import json
import re
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest_distcompat.calls import Call, kind_of, offered, refused
from pytest_distcompat.cell import Cell
from pytest_distcompat.checks._walk import findings
from pytest_distcompat.driver import Driver
from pytest_distcompat.drivers import find_driver
from pytest_distcompat.failures import UsageProblem
from pytest_distcompat.installed import version_of
from pytest_distcompat.runner import Runner
from pytest_distcompat.trace import RunTrace, Trace
from pytest_distcompat.walk.sequence import Walk, allowed

#: Walks that failed once: driver, strategies, calls. ``avoid`` matches the walks that a bug, not mended yet, makes fail.
CORPUS = Path(__file__).with_name("corpus.json")
#: How many calls a walk has at most, and how many walks the profile draws in a cell.
LENGTH, WALKS = 10, 20
#: The calls that half of those drawn are.
UPDATES = frozenset({"micro", "step"})


class WalkFailed(Exception):
    """Raised for a walk that fails."""


@dataclass
class Explorer:
    """Walks of one driver in one cell.

    Args:
        runner: What runs them.
        driver: The driver's name.
        cell: The cell.
        note: Called with each walk that has run, and what is wrong with it.
    """

    runner: Runner
    driver: str
    cell: Cell
    note: Callable[[Walk, Sequence[str]], None] = lambda walk, wrong: None  # noqa: ARG005
    #: The calls of walks that failed, up to the call that did, with what is wrong; and of beginnings that passed.
    failed: dict[tuple[Call, ...], list[str]] = field(default_factory=dict)
    passed: set[tuple[Call, ...]] = field(default_factory=set)
    #: The runs of the walks that failed, by those calls.
    runs: dict[tuple[Call, ...], dict[str, RunTrace]] = field(default_factory=dict)

    @property
    def kind(self) -> type[Driver]:
        """Return the driver's class."""
        return find_driver(self.driver)

    def check(self, calls: Sequence[Call]) -> tuple[Call, ...]:
        """Run a walk; return its calls up to the one that failed, or nothing.

        One that begins like another that failed, or is the beginning of one that passed, is not run.
        """
        walk = Walk(tuple(calls), self.kind.walk_calls)
        beginnings = (walk.calls[:length] for length in range(1, len(walk.calls) + 1))
        if known := next((one for one in beginnings if one in self.failed), None):
            return known
        if walk.calls in self.passed:
            return ()
        scenario = walk.scenario()
        trace = self.runner.trace(self.driver, self.cell, scenario)
        sound, wrong = findings(self.cell, trace, scenario.runs[-1].name)
        for directory in self.runner.directories(self.driver, self.cell, scenario):
            shutil.rmtree(directory, ignore_errors=True)
        self.passed |= {walk.calls[:length] for length in range(sound + 1)}
        self.note(walk, wrong)
        if not wrong:
            return ()
        found = walk.calls[: sound + 1]
        self.failed[found], self.runs[found] = wrong, dict(trace.runs)
        return found

    def corpus(self) -> Iterator[tuple[tuple[Call, ...], Mapping[str, Any]]]:
        """Yield the walks that failed once in this driver and strategy."""
        for entry in json.loads(CORPUS.read_text(encoding="utf-8")):
            if entry["driver"] == self.kind.name and self.cell.strategy in entry["strategies"]:
                yield tuple(map(Call.parse, entry["calls"])), entry

    @property
    def seed(self) -> int:
        """Return what a session draws by: the same number until a release of the driver's libraries changes."""
        return zlib.crc32(" ".join(str(version_of(name)) for name in self.kind.libraries).encode())

    def explore(self, examples: int, seed: int, length: int = LENGTH) -> Trace:
        """Replay the corpus, make every read-only call, then draw; return the runs of the walks that fail.

        Args:
            examples: How many walks to draw.
            seed: What they are drawn by.
            length: How many calls a walk has at most.
        """
        replayed = [self.check(calls) for calls, entry in self.corpus() if "hangs" not in entry]
        observed = self.check_observers()
        drawn = self.draw(examples, seed, length)
        runs = [run for calls in (*replayed, observed, drawn) for run in self.runs.get(calls, {}).values()]
        return Trace.of(self.driver, runs)

    def observe(self) -> Trace:
        """Make every read-only call; return the runs of the walk that fails, none if all is well."""
        return Trace.of(self.driver, self.runs.get(self.check_observers(), {}).values())

    def check_observers(self) -> tuple[Call, ...]:
        """Run a walk of every read-only call between two steps; return the shortest part that fails, or nothing."""
        step, calls = Call("step"), self.observers()
        found = self.check([step, *calls, step])
        # Any of them may have caused what only the next step shows.
        for call in (found[-1:] if found[-1:] != (step,) else calls) if found else ():
            if alone := self.check([step, call, step]):
                return alone
        return found

    def observers(self) -> list[Call]:
        """Return all read-only calls, with each of their arguments, but those that are known to be broken."""
        kind, step, found = self.kind.walk_calls, Call("step"), list[Call]()
        assert kind is not None
        reasons, known = refused(kind, self.cell.strategy), self.known
        for call in offered(kind):
            text = ", ".join(map(str, [step, *found, call, step]))
            observes = kind_of(kind, call.name) == "observer" and call not in reasons
            if observes and allowed([step, *found], call, kind.own) and not any(one.search(text) for one in known):
                found.append(call)
        return found

    @property
    def known(self) -> list[re.Pattern[str]]:
        """Return what matches the walks that a bug, not mended yet, makes fail."""
        return [re.compile(entry["avoid"]) for _, entry in self.corpus() if "avoid" in entry]

    def draw(self, examples: int, seed: int, length: int = LENGTH) -> tuple[Call, ...]:
        """Run drawn walks until one fails; return the shortest that Hypothesis makes of it, or nothing."""
        try:
            from hypothesis import HealthCheck, Phase, Verbosity, given, settings, strategies
            from hypothesis import seed as seeded
        except ImportError:
            raise UsageProblem("walks need hypothesis: pip install 'pytest-distcompat[walk]'") from None

        reasons, own = refused(self.kind.walk_calls, self.cell.strategy), self.kind.walk_calls.own
        possible = [call for call in offered(self.kind.walk_calls) if call not in reasons]
        # Observers are many: of 20 walks that draw all calls alike, in DeepSpeed 4 step, and 1 steps after a micro-batch.
        updates = [call for call in possible if call.name in UPDATES] or possible
        call = strategies.one_of(strategies.sampled_from(updates), strategies.sampled_from(possible))
        known = self.known
        failed: set[tuple[Call, ...]] = set()

        @seeded(seed)
        @settings(
            max_examples=examples,
            phases=(Phase.generate, Phase.shrink),
            deadline=None,
            database=None,
            print_blob=False,
            report_multiple_bugs=False,
            verbosity=Verbosity.quiet,
            suppress_health_check=list(HealthCheck),
        )
        @given(strategies.lists(call, max_size=length + length // 2))
        def run(drawn: list[Call]) -> None:
            calls: list[Call] = []
            for one in drawn:
                # What is known to be broken would be all that is found.
                text = ", ".join(map(str, [*calls, one]))
                if allowed(calls, one, own) and not any(pattern.search(text) for pattern in known):
                    calls.append(one)
            if found := self.check(calls[:length]):
                failed.add(found)
                raise WalkFailed

        try:
            run()
        except WalkFailed:
            return min(failed, key=lambda calls: (len(calls), len(str(calls))))
        return ()
