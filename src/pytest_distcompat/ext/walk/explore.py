"""Exploration of walks: replay those that failed once, make read-only calls, draw new ones.

A *walk* is a sequence of calls of a live trainer, such as ``step(), micro(), save(), step()``
(``sequence``). To run one means to train by these calls on several ranks (processes) and, as the
*reference*, in one process, and to compare the two after each call (``claim``).

An ``Explorer`` runs walks of one *driver*, the class that says how a trainer is built and called,
in one *cell*: strategy, precision and number of ranks, such as ``fsdp2-fp32-w2-model_mlp``. The
check ``walk`` of suites (``check``) and the command ``distcompat walk`` (``command``) make one. The
calls come from the driver's class of calls, ``live_calls``: its methods declared as ``training`` or
as ``observer``, a call that only reads and must change nothing.

To run a walk is to run a *scenario*: several *runs*, each one process group from start to end. What
their ranks recorded is a *trace*.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest_distcompat.calls import Call, kind_of, offered, refused
from pytest_distcompat.cell import Cell
from pytest_distcompat.driver import Driver
from pytest_distcompat.drivers import find_driver
from pytest_distcompat.ext.walk.claim import findings
from pytest_distcompat.ext.walk.sequence import Walk, allowed
from pytest_distcompat.failures import UsageProblem
from pytest_distcompat.installed import version_of
from pytest_distcompat.launch.files import remove_all_but_recorded
from pytest_distcompat.runner import Runner
from pytest_distcompat.trace import RunTrace, Trace

#: Walks that failed once, a list of dicts: ``driver``, ``strategies``, and ``calls``, as
#: ``["save()", "step()"]``. ``avoid`` is a regular expression for the walks that a bug, not mended
#: yet, makes fail. Walks with ``hangs`` are not replayed.
CORPUS = Path(__file__).with_name("corpus.json")
#: How many calls a walk has at most.
LENGTH = 10
#: How many walks the profile draws in a cell.
WALKS = 20
#: Half of the calls that are drawn are among these, which train.
UPDATES = frozenset({"micro", "step"})
#: The calls of a walk, or of its beginning.
_Calls = tuple[Call, ...]
#: A run is one process group from start to end: ``walk-1a2b3c4d-0`` -> what its ranks recorded.
_RunsByName = dict[str, RunTrace]
#: Called with a walk, and what is wrong with it.
_Note = Callable[[Walk, Sequence[str]], None]


class WalkFailed(Exception):
    """Raised for a walk that fails, so that Hypothesis shrinks it."""


@dataclass(frozen=True)
class WalkOutcome:
    """What came of a walk.

    Attributes:
        trace: Its runs: what the ranks recorded after each call.
        sound_calls: The number of calls after which it was equal to its reference.
        wrong: The findings after the next call; none if the whole walk was equal.
    """

    trace: Trace
    sound_calls: int
    wrong: list[str]


def run_walk(runner: Runner, driver: str, cell: Cell, walk: Walk) -> WalkOutcome:
    """Run a walk of a driver in a cell, and compare it with its reference."""
    # A scenario is several runs. The last one is that of the reference.
    scenario = walk.scenario()
    trace = runner.trace(driver, cell, scenario)
    sound_calls, wrong = findings(cell, trace, scenario.runs[-1].name)
    return WalkOutcome(trace, sound_calls, wrong)


@dataclass
class Explorer:
    """Walks of one driver in one cell.

    Args:
        runner: What runs them.
        driver: The driver's name, such as ``torch``.
        cell: The cell.
        note: Called with each walk that has run, and what is wrong with it.
    """

    runner: Runner
    driver: str
    cell: Cell
    note: _Note = lambda walk, wrong: None  # noqa: ARG005
    #: The calls of each walk that failed, up to the call that did -> what is wrong.
    failed: dict[_Calls, list[str]] = field(default_factory=dict)
    #: The walks, and beginnings of walks, that were equal to the reference.
    passed: set[_Calls] = field(default_factory=set)
    #: The same keys as those of ``failed`` -> the runs of the walk.
    runs: dict[_Calls, _RunsByName] = field(default_factory=dict)

    @property
    def kind(self) -> type[Driver]:
        """Return the driver's class."""
        return find_driver(self.driver)

    def check(self, calls: Sequence[Call]) -> _Calls:
        """Run a walk, and return its calls up to the one that failed; empty if none did.

        A walk whose result is known is not run again: it begins like one that failed, or it is the
        beginning of one that passed. Hypothesis tries many such walks.
        """
        walk = Walk(tuple(calls), self.kind.live_calls)
        for length in range(1, len(walk.calls) + 1):
            beginning = walk.calls[:length]
            if beginning in self.failed:
                return beginning
        if walk.calls in self.passed:
            return ()
        return self._run(walk)

    def _run(self, walk: Walk) -> _Calls:
        """Run a walk and note what came of it.

        Returns:
            The calls up to the one that failed; empty if none did.
        """
        done = run_walk(self.runner, self.driver, self.cell, walk)
        # Checkpoints and logs of many walks would fill the disk.
        for directory in self.runner.directories(self.driver, self.cell, walk.scenario()):
            remove_all_but_recorded(directory)
        # Each beginning of it has passed too.
        for length in range(done.sound_calls + 1):
            self.passed.add(walk.calls[:length])
        self.note(walk, done.wrong)
        if not done.wrong:
            return ()
        failed = walk.calls[: done.sound_calls + 1]
        self.failed[failed] = done.wrong
        self.runs[failed] = dict(done.trace.runs)
        return failed

    def corpus(self) -> Iterator[tuple[_Calls, Mapping[str, Any]]]:
        """Yield the walks that failed once in this driver and strategy, with their entries."""
        for entry in _entries(self.kind, self.cell.strategy):
            calls = [Call.parse(text) for text in entry["calls"]]
            yield tuple(calls), entry

    @property
    def seed(self) -> int:
        """Return the seed by which a session draws, made from the releases of the libraries.

        So a session draws the same walks as the last one, until a library changes.
        """
        versions = [str(version_of(library)) for library in self.kind.libraries]
        text = " ".join(versions)
        return zlib.crc32(text.encode())

    def explore(self, examples: int, seed: int, length: int = LENGTH) -> Trace:
        """Replay the corpus, make every read-only call, then draw.

        Args:
            examples: How many walks to draw.
            seed: What they are drawn by.
            length: How many calls a walk has at most.

        Returns:
            The runs of the walks that fail.
        """
        failed: list[_Calls] = []
        for calls, entry in self.corpus():
            if "hangs" not in entry:
                failed.append(self.check(calls))
        failed.append(self.check_observers())
        failed.append(self.draw(examples, seed, length))
        runs: list[RunTrace] = []
        for calls in failed:
            runs += self._runs_of(calls)
        return Trace.of(self.driver, runs)

    def observe(self) -> Trace:
        """Make every read-only call.

        Returns:
            The runs of the walk that fails; none if all is well.
        """
        failed = self.check_observers()
        return Trace.of(self.driver, self._runs_of(failed))

    def _runs_of(self, failed: _Calls) -> list[RunTrace]:
        """Return the runs of the walk that failed at the last of these calls; none for no calls."""
        return list(self.runs.get(failed, {}).values())

    def check_observers(self) -> _Calls:
        """Run a walk of every read-only call between two steps.

        If it fails, it runs shorter walks to find the call to blame.

        Returns:
            The calls of the shortest part that fails; empty if none does.
        """
        step = Call("step")
        observers = self.observers()
        failed = self.check([step, *observers, step])
        if not failed:
            return ()
        suspects = [failed[-1]]
        if failed[-1] == step:
            # Only the step after all of them failed: any of them may have caused that.
            suspects = observers
        for call in suspects:
            failed_alone = self.check([step, call, step])
            if failed_alone:
                return failed_alone
        return failed

    def observers(self) -> list[Call]:
        """Return all read-only calls, with each of their arguments.

        Those that are known to be broken are left out.
        """
        kind = self.kind.live_calls
        assert kind is not None
        step = Call("step")
        reasons = refused(kind, self.cell.strategy)
        known = self.known
        observers: list[Call] = []
        for call in offered(kind):
            if kind_of(kind, call.name) != "observer" or call in reasons:
                continue
            before = [step, *observers]
            if not allowed(before, call, kind.own):
                continue
            if not matches_any(known, [*before, call, step]):
                observers.append(call)
        return observers

    @property
    def known(self) -> list[re.Pattern[str]]:
        """Return patterns of the walks that a bug, not mended yet, makes fail."""
        return known_failures(self.kind, self.cell.strategy)

    def draw(self, examples: int, seed: int, length: int = LENGTH) -> _Calls:
        """Run drawn walks until one fails; Hypothesis then shrinks it to a short one that fails.

        Args:
            examples: How many walks to draw.
            seed: What they are drawn by.
            length: How many calls a walk has at most.

        Returns:
            The calls of the shortest walk that Hypothesis makes of it; empty if none fails.
        """
        try:
            from hypothesis import HealthCheck, Phase, Verbosity, given, settings, strategies
            from hypothesis import seed as seeded
        except ImportError:
            raise UsageProblem(
                "walks need hypothesis: pip install 'pytest-distcompat[walk]'"
            ) from None

        kind = self.kind.live_calls
        reasons = refused(kind, self.cell.strategy)
        possible = [call for call in offered(kind) if call not in reasons]
        updates = [call for call in possible if call.name in UPDATES]
        # Half of the calls drawn are updates, because observers are many: when all calls were drawn
        # alike, only 4 of 20 walks of DeepSpeed had a step, and 1 a step after a micro-batch.
        call = strategies.one_of(
            strategies.sampled_from(updates or possible), strategies.sampled_from(possible)
        )
        known = self.known
        failed: set[_Calls] = set()

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
            calls = self._valid_walk(drawn, known)
            failed_calls = self.check(calls[:length])
            if failed_calls:
                failed.add(failed_calls)
                raise WalkFailed

        try:
            run()
        except WalkFailed:
            return min(failed, key=_length)
        return ()

    def _valid_walk(self, drawn: Iterable[Call], known: Sequence[re.Pattern[str]]) -> list[Call]:
        """Return the drawn calls without those that cannot follow the others.

        Args:
            drawn: What Hypothesis has drawn.
            known: Patterns of walks that are known to fail, of which new ones would say nothing.
        """
        kind = self.kind.live_calls
        assert kind is not None
        calls: list[Call] = []
        for next_call in drawn:
            if not allowed(calls, next_call, kind.own):
                continue
            if not matches_any(known, [*calls, next_call]):
                calls.append(next_call)
        return calls


def _length(calls: _Calls) -> tuple[int, int]:
    """Return the key by which the shortest walk is chosen: number of calls, then of characters."""
    return len(calls), len(str(calls))


def known_failures(driver: type[Driver], strategy: str) -> list[re.Pattern[str]]:
    """Return patterns of the walks that a bug, not mended yet, makes fail (``avoid``).

    Args:
        driver: The driver whose walks they are.
        strategy: The strategy under which they fail.
    """
    patterns: list[re.Pattern[str]] = []
    for entry in _entries(driver, strategy):
        if "avoid" in entry:
            patterns.append(re.compile(entry["avoid"]))
    return patterns


def _entries(driver: type[Driver], strategy: str) -> Iterator[dict[str, Any]]:
    """Yield the entries of the corpus that concern a driver under a strategy."""
    text = CORPUS.read_text(encoding="utf-8")
    for entry in json.loads(text):
        if entry["driver"] == driver.name and strategy in entry["strategies"]:
            yield entry


def matches_any(patterns: Iterable[re.Pattern[str]], calls: Iterable[Call]) -> bool:
    """Tell whether any pattern is in the text of a walk: ``step(), save(), step()``."""
    text = ", ".join(map(str, calls))
    for pattern in patterns:
        if pattern.search(text):
            return True
    return False
