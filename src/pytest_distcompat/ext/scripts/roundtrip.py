"""Comparison of three runs of one script: it must train after a resume as if it never stopped.

``resume_roundtrip`` (module ``resuming``) launches the script three times, makes a ``RoundTrip`` of
the runs, and calls its ``check()``. With ``save_at=3, total=5`` the runs are

- ``through``: steps 1 to 5 without a stop;
- ``stopped``: steps 1 to 3, ended after the checkpoint of step 3 by the *probe*, the code that
  records the script from inside its processes;
- ``resumed``: loads that checkpoint, then steps 4 and 5.

Steps 4 and 5 of ``resumed`` must be those of ``through``, bit by bit on the CPU. If they are not,
the values at the save and after the load are compared too, because they often show the cause. The
result is ``findings``: sentences such as ``rank 0: losses: 2.31 instead of 2.29 in step 4, 1 after
the load``, none if all is well.

What is compared are *snapshots*: what the probe of one rank recorded of model, optimizer and
scheduler after one *action*, such as ``step``, ``save`` or ``load``. Each has an index: 100
(``STRIDE``) times the steps that were taken until then, plus an offset for a save or load between
two steps. So 300 is step 3, and 310 a save after it.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from pytest_distcompat.checks import message, pairs
from pytest_distcompat.checks.extra_state import other_states, unchanged, unlike_on_ranks
from pytest_distcompat.ext.scripts.environment import ProbeConfig
from pytest_distcompat.ext.scripts.quantities import CAUSES_FIRST, are_equal, describe_difference
from pytest_distcompat.ext.scripts.recorder import STRIDE
from pytest_distcompat.ext.scripts.result import ScriptRun
from pytest_distcompat.failures import Incompatible, hides_frames
from pytest_distcompat.model_values import differences, other_dtypes, settings, values
from pytest_distcompat.trace import Snapshot

#: pytest looks for this name: https://docs.pytest.org/en/stable/example/simple.html
__tracebackhide__ = hides_frames


@dataclass(frozen=True)
class _Difference:
    """What differs in a step after a load.

    Attributes:
        quantity: ``losses``, ``rng``, ...
        resumed: The snapshot of the step in the resumed run.
        finding: The finding about it.
    """

    quantity: str
    resumed: Snapshot
    finding: str


@dataclass(frozen=True)
class RoundTrip:
    """Three runs of a script that is stopped and resumed.

    Attributes:
        through: The run that never stopped.
        stopped: The run that ended after the checkpoint.
        resumed: The run that loaded the checkpoint.
        save_at: The step after which the checkpoint was written.
        total: The number of steps of the whole training.
        same: The quantities that must agree, such as ``losses``, ``parameters`` and ``rng``; all
            are in ``SAME`` of ``ext.scripts.quantities``.
        resharded: Whether the resumed run has another number of ranks.
    """

    through: ScriptRun
    stopped: ScriptRun
    resumed: ScriptRun
    save_at: int
    total: int
    same: tuple[str, ...]
    resharded: bool = False

    @property
    def steps_left(self) -> int:
        """Return how many steps the resumed run must take.

        It is 0 if that run only evaluates the model that it loads.
        """
        return self.total - self.save_at

    @property
    def findings(self) -> list[str]:
        """Return what is wrong. If a run took the wrong steps, that is the only finding."""
        runs = {"run": self.through, "stopped run": self.stopped, "resumed run": self.resumed}
        for title, run in runs.items():
            # With ``save_at=total`` the resumed run evaluates only. ``missing_evidence`` says why
            # the probe recorded nothing to judge.
            must_train = run is not self.resumed or self.steps_left > 0
            problem = run.missing_evidence(trains=must_train)
            if problem:
                return [f"the {title}: {problem}"]
        wrong_steps = list(self._wrong_steps())
        if wrong_steps:
            return wrong_steps
        states = list(self._states())
        explained: set[str] = set()
        if states:
            # State that a load did not bring back differs in all later steps too: say it once.
            explained.add("extra_state")
        differing_steps = list(self._differing_steps(explained=explained))
        # The likely causes come first: a script that is not repeatable, then what a load lost.
        findings = [
            *self._not_repeatable(),
            *states,
            *self._loaded(explain=bool(differing_steps)),
            *differing_steps,
        ]
        # Without repetitions, in order.
        return list(dict.fromkeys(findings))

    def check(self) -> None:
        """Raise Incompatible with the findings, if there are any."""
        findings = self.findings
        if not findings:
            return
        runs = (self.through, self.stopped, self.resumed)
        # ``labels``: a line for each change that this package made to a library, so that it runs on
        # CPU ranks.
        lines = [message(findings), *self.resumed.labels]
        for run in runs:
            lines.append(f"logs: {run.directory}")
        # A run crashed or hung. That fails the test even if the user has declared that it fails.
        hard = any(run.hard for run in runs)
        raise Incompatible("\n".join(lines), hard=hard)

    def _wrong_steps(self) -> Iterator[str]:
        """Yield a finding if a run took another number of steps than it should.

        The resumed run should take the steps that are left. If it took all, it did not resume: it
        started again.
        """
        through = _steps_taken(self.through)
        stopped = _steps_taken(self.stopped)
        resumed = _steps_taken(self.resumed)
        if through != self.total:
            yield f"the run took {through} steps; expected total={self.total}"
        elif stopped != self.save_at:
            yield f"the stopped run took {stopped} steps; expected save_at={self.save_at}"
        elif resumed == self.total:
            finding = f"the resumed run took {resumed} steps, all of them"
            expected = f"expected it to start at step {self.save_at + 1}"
            yield f"{finding}: it started again at step 0; {expected}"
        elif resumed != self.steps_left:
            left = f"{self.steps_left} were left after step {self.save_at}"
            yield f"the resumed run took {resumed} steps; {left}"

    def _not_repeatable(self) -> Iterator[str]:
        """Yield a finding if the two runs from the start differ before the checkpoint.

        Both train the same steps from the same start. If they differ already, a resumed run that
        differs too says nothing about the checkpoint. One finding, of the first such step, is
        enough.
        """
        for number in range(self.save_at):
            snapshots = pairs(_step(self.through, number), _step(self.stopped, number))
            for through, stopped in snapshots:
                differing = []
                for name in ("losses", "data"):
                    if not self._equal(name, through, stopped):
                        differing.append(name)
                if differing:
                    names = " and ".join(differing)
                    yield (
                        f"rank {through.rank}: {names} differ in step {number + 1} "
                        "of two runs from the start: "
                        "the script is not repeatable (is a seed missing?)"
                    )
                    return

    def _loaded(self, *, explain: bool) -> Iterator[str]:
        """Yield differences between saved and loaded values.

        Saved values are those of the stopped run at its checkpoint. Loaded ones are those of the
        resumed run after its load, on any number of ranks.

        Equal steps on the CPU prove that the loaded values were right, so the values are compared
        only if steps cannot be compared bit by bit (on a GPU, on another number of ranks, without
        a step left), or with ``explain``: steps differ, and the values may show why.
        """
        saved = _at_save(self.stopped, self.save_at)
        loaded = _at_load(self.resumed)
        if not loaded:
            yield "the resumed run read no checkpoint by any of the calls that are known"
            return
        bit_by_bit = not self.resharded and self.stopped.device == "cpu"
        steps_suffice = bit_by_bit and self.steps_left > 0
        if steps_suffice and not explain:
            return
        when = f"after the load at {self.resumed.trace.world_size} ranks"
        with_states = "optimizer" in self.same
        # The digests of whole tensors, put together from those of the ranks' parts.
        saved_values = values(self.stopped.trace, saved)
        loaded_values = values(self.resumed.trace, loaded)
        # Findings about values, then about dtypes.
        yield from differences(saved_values, loaded_values, when, states=with_states)
        yield from other_dtypes(saved_values, loaded_values, when, states=with_states)
        # The scheduler of a run with steps left is compared step by step.
        if not self.steps_left and not self.resharded and "scheduler" in self.same:
            yield from settings(saved, loaded, when)

    def _states(self) -> Iterator[str]:
        """Yield what is wrong with extra state: variables beside model and optimizer, as ``ema``.

        Each must exist while the script trains, change from step to step, be alike on all ranks,
        and come back by the load. Its values in later steps are compared in
        ``_differing_steps``.
        """
        if "extra_state" not in self.same or self.resharded:
            return
        #: ``"step 2"`` -> the snapshots of all ranks after it. Steps are left out at which no rank
        #: had any of the variables: the function that has them may not run then.
        steps: dict[str, tuple[Snapshot, ...]] = {}
        #: The names of the variables that existed in any step.
        seen: set[str] = set()
        for nth in range(self.total):
            snapshots = _step(self.through, nth)
            names: set[str] = set()
            for snapshot in snapshots:
                names.update(info.name for info in snapshot.extra)
            if names:
                steps[f"step {nth + 1}"] = snapshots
                seen |= names
        # The probe's configuration has the names that the user gave.
        for name in ProbeConfig.read(self.through.directory).extra_state:
            if name not in seen:
                yield f"extra_state names {name!r}: the script has no such variable while it trains"
        # Findings about states that differ between ranks, then about those that never change.
        yield from unlike_on_ranks(steps)
        if len(steps) > 1:
            first, *_, last = steps.values()
            yield from unchanged(first, last, f"{len(steps)} steps")
        for before, after in pairs(_at_save(self.stopped, self.save_at), _at_load(self.resumed)):
            # The state and the place in it, as text, where the two snapshots differ first.
            for difference in other_states(before, after):
                yield f"rank {after.rank}: {difference} is another after the load than was saved"

    def _differing_steps(self, explained: Collection[str]) -> Iterator[str]:
        """Yield the first difference of each quantity on each rank.

        The resumed run is compared with the run that never stopped: its first step with step
        ``save_at + 1`` of that run, and so on. Random states may differ if nothing else does and
        they do not matter (``_state_matters``).

        Args:
            explained: Quantities whose differences have a finding already.
        """
        if self.resharded:
            # Another number of ranks feeds each rank other data.
            return
        quantities: list[str] = []
        for quantity in CAUSES_FIRST:
            if quantity in self.same and quantity not in explained:
                quantities.append(quantity)
        #: The rank and the quantity of each difference so far. Later steps differ because of it.
        reported: set[tuple[int, str]] = set()
        differences: list[_Difference] = []
        for number in range(self.save_at, self.total):
            steps_after_load = number + 1 - self.save_at
            when = f"in step {number + 1}, {steps_after_load} after the load"
            through_step = _step(self.through, number)
            resumed_step = _step(self.resumed, steps_after_load - 1)
            snapshots = list(pairs(through_step, resumed_step))
            for quantity, (expected, resumed) in itertools.product(quantities, snapshots):
                rank = expected.rank
                if (rank, quantity) in reported or self._equal(quantity, expected, resumed):
                    continue
                reported.add((rank, quantity))
                text = describe_difference(quantity, expected, resumed)
                finding = f"rank {rank}: {quantity}: {text} {when}"
                differences.append(_Difference(quantity, resumed, finding))
        only_random = all(difference.quantity == "rng" for difference in differences)
        for difference in differences:
            if only_random and not self._state_matters(difference.resumed):
                continue
            yield difference.finding

    def _state_matters(self, resumed: Snapshot) -> bool:
        """Tell whether another random state after the load is a defect by itself.

        It is if the rank draws in every step, as for dropout, and if the state is one from before
        the save, so that nothing has loaded it. Otherwise the iterator of a loader alone draws: it
        is made anew after the load.
        """
        states: list[str] = []
        for nth in range(self.total):
            for snapshot in _step(self.through, nth):
                if snapshot.rank == resumed.rank:
                    states.append(snapshot.rng)
        since_save = states[self.save_at - 1 :]
        if all(before != after for before, after in itertools.pairwise(since_save)):
            return True
        saved = since_save[0]
        return resumed.rng != saved and resumed.rng in states[: self.save_at - 1]

    def _equal(self, quantity: str, expected: Snapshot, actual: Snapshot) -> bool:
        """Tell whether a quantity, such as ``losses``, of one rank and step is equal in two runs.

        On a GPU there is a tolerance.
        """
        return are_equal(quantity, expected, actual, on_cpu=self.through.device == "cpu")


def _steps_taken(run: ScriptRun) -> int:
    """Return the number of optimizer steps of a run, from the index of its last step."""
    return max(run.trace.indices("step"), default=0) // STRIDE


def _step(run: ScriptRun, nth: int) -> tuple[Snapshot, ...]:
    """Return the snapshots of all ranks after the step of that number, from 0."""
    return run.trace.at_index((nth + 1) * STRIDE)


def _at_save(run: ScriptRun, save_at: int) -> tuple[Snapshot, ...]:
    """Return the snapshots of the save after that step.

    A file that one rank alone wrote has no snapshots of its own. Then they are those of the step:
    nothing has changed since.
    """
    for index in run.trace.indices("save"):
        if index // STRIDE == save_at:
            return run.trace.at_index(index)
    return run.trace.at_index(save_at * STRIDE)


def _at_load(run: ScriptRun) -> tuple[Snapshot, ...]:
    """Return the snapshots of the load.

    A script that reads its file by ``torch.load``, and trains on, has no snapshot of a load. Then
    they are those of the action ``build``, just before the first step, when the script has loaded
    everything.
    """
    return run.trace.at("load") or run.trace.at("build")
