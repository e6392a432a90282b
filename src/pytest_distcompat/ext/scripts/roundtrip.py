"""Round trip of a script that is stopped and resumed.

It must train as if it had never stopped.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_distcompat.checks import message, pairs
from pytest_distcompat.checks.extra_state import other_states, unchanged, unlike_on_ranks
from pytest_distcompat.ext.scripts.environment import ProbeConfig
from pytest_distcompat.ext.scripts.launching import (
    RANKS,
    Host,
    check_argument,
    launch,
    leave_directory,
)
from pytest_distcompat.ext.scripts.recorder import STRIDE
from pytest_distcompat.ext.scripts.result import ScriptRun
from pytest_distcompat.failures import Incompatible, RunFailedError, UsageProblem, hides_frames
from pytest_distcompat.model_values import differences, other_dtypes, settings, values
from pytest_distcompat.trace import Snapshot

#: pytest looks for this name: https://docs.pytest.org/en/stable/example/simple.html
__tracebackhide__ = hides_frames


@dataclass(frozen=True)
class _StoredValue:
    """A tensor as one rank stores it.

    The dtype is empty for a single number: a load may make a tensor of it.
    """

    digest: str
    dtype: str


@dataclass(frozen=True)
class _OptimizerValues:
    """One rank's optimizer: its state and flat masters by name, and the numbers of its groups."""

    states: Mapping[str, _StoredValue]
    param_groups: tuple[Mapping[str, float], ...]


def _losses(snapshot: Snapshot) -> tuple[float | None, ...]:
    return (snapshot.loss,)


def _grad_norms(snapshot: Snapshot) -> tuple[float, ...]:
    return tuple(math.sqrt(step.square) for step in snapshot.steps)


def _parameters(snapshot: Snapshot) -> dict[str, _StoredValue]:
    """Return the parameters and buffers by name."""
    return {
        info.name: _StoredValue(info.digest, info.dtype)
        for info in (*snapshot.parameters, *snapshot.buffers)
    }


def _optimizer(snapshot: Snapshot) -> _OptimizerValues:
    states: dict[str, _StoredValue] = {}
    for info in (*snapshot.states, *snapshot.masters):
        # A load may return a single number as a tensor, whose dtype says nothing.
        dtype = "" if info.numel == 1 else info.dtype
        name = f"{info.key} of {info.owner}"
        states[name] = _StoredValue(info.digest, dtype)
    return _OptimizerValues(states, snapshot.param_groups)


def _extra_state(snapshot: Snapshot) -> dict[str, Mapping[str, str]]:
    """Return the values of each extra state that a checkpoint is to bring back."""
    return {info.name: info.values for info in snapshot.extra if info.expected.comes_back}


#: How each quantity of one rank in one step is read.
_READERS: Mapping[str, Callable[[Snapshot], Any]] = {
    "losses": _losses,
    "grad_norms": _grad_norms,
    "parameters": _parameters,
    "optimizer": _optimizer,
    "scheduler": lambda snapshot: snapshot.scheduler,
    "rng": lambda snapshot: snapshot.rng,
    "data": lambda snapshot: snapshot.inputs,
    "extra_state": _extra_state,
}
#: The quantities that can be compared, step by step and rank by rank.
SAME = tuple(_READERS)
#: The order in which differences of one step are reported: what all others follow from comes first.
_CAUSES_FIRST = ("data", *(quantity for quantity in SAME if quantity != "data"))
#: Relative tolerance of losses and gradient norms on a GPU, where the order of sums is not fixed.
TOLERANCE = 1e-4
#: Calls that write a checkpoint which the probe recognizes.
CHECKPOINT_CALLS = (
    "Accelerator.save_state, transformers.Trainer, an engine's save_checkpoint, "
    "torch.distributed.checkpoint's save, torch.save"
)
#: Quantities that are compared bit by bit, and on the CPU only.
_EXACT = ("parameters", "optimizer", "rng", "extra_state")


@dataclass(frozen=True)
class RoundTrip:
    """Three runs of a script that is stopped and resumed.

    Attributes:
        through: The run that never stopped.
        stopped: The run that ended after the checkpoint.
        resumed: The run that loaded the checkpoint.
        save_at: The step after which the checkpoint was written.
        total: The number of steps of the whole training.
        same: The quantities that must agree, of ``SAME``.
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
            must_train = run is not self.resumed or self.steps_left > 0
            problem = run.missing_evidence(trains=must_train)
            if problem:
                return [f"the {title}: {problem}"]
        wrong_steps = list(self._wrong_steps())
        if wrong_steps:
            return wrong_steps
        states = list(self._states())
        differing_steps = list(
            self._differing_steps(explained={"extra_state"} if states else set())
        )
        findings = [
            *self._not_repeatable(),
            *states,
            *self._loaded(explain=bool(differing_steps)),
            *differing_steps,
        ]
        return list(dict.fromkeys(findings))

    def check(self) -> None:
        """Raise Incompatible with the findings, if there are any."""
        findings = self.findings
        if not findings:
            return
        runs = (self.through, self.stopped, self.resumed)
        lines = [message(findings), *self.resumed.labels]
        for run in runs:
            lines.append(f"logs: {run.directory}")
        hard = any(run.hard for run in runs)
        raise Incompatible("\n".join(lines), hard=hard)

    def _wrong_steps(self) -> Iterator[str]:
        """Yield a finding if a run took another number of steps than it should.

        The resumed run takes those that are left.
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
        """Yield a finding if the two runs from the start differ.

        A third run cannot be compared with them then.
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

        They are compared on any number of ranks, but only where steps cannot be compared bit by
        bit, or to ``explain`` why steps differ.
        """
        saved = _at_save(self.stopped, self.save_at)
        loaded = _at_load(self.resumed)
        if not loaded:
            yield "the resumed run read no checkpoint by any of the calls that are known"
            return
        same_device = not self.resharded and self.stopped.device == "cpu"
        steps_suffice = same_device and self.steps_left > 0
        if steps_suffice and not explain:
            return
        when = f"after the load at {self.resumed.trace.world_size} ranks"
        with_states = "optimizer" in self.same
        saved_values = values(self.stopped.trace, saved)
        loaded_values = values(self.resumed.trace, loaded)
        yield from differences(saved_values, loaded_values, when, states=with_states)
        yield from other_dtypes(saved_values, loaded_values, when, states=with_states)
        if not self.steps_left and not self.resharded and "scheduler" in self.same:
            yield from settings(saved, loaded, when)

    def _states(self) -> Iterator[str]:
        """Yield what is wrong with state beside model and optimizer.

        How it goes on after the load is compared step by step.
        """
        if "extra_state" not in self.same or self.resharded:
            return
        # Of steps without variables nothing is compared: a function that has returned has none.
        steps: dict[str, tuple[Snapshot, ...]] = {}
        seen: set[str] = set()
        for nth in range(self.total):
            snapshots = _step(self.through, nth)
            names = {info.name for snapshot in snapshots for info in snapshot.extra}
            if names:
                steps[f"step {nth + 1}"] = snapshots
                seen |= names
        for name in ProbeConfig.read(self.through.directory).extra_state:
            if name not in seen:
                yield f"extra_state names {name!r}: the script has no such variable while it trains"
        yield from unlike_on_ranks(steps)
        if len(steps) > 1:
            first, *_, last = steps.values()
            yield from unchanged(first, last, f"{len(steps)} steps")
        for before, after in pairs(_at_save(self.stopped, self.save_at), _at_load(self.resumed)):
            for difference in other_states(before, after):
                yield f"rank {after.rank}: {difference} is another after the load than was saved"

    def _differing_steps(self, explained: Collection[str]) -> Iterator[str]:
        """Yield the first difference of each quantity on each rank.

        The resumed run is compared with the run that never stopped.

        Args:
            explained: Quantities whose differences have a finding already.
        """
        if self.resharded:
            return
        quantities = [
            quantity
            for quantity in _CAUSES_FIRST
            if quantity in self.same and quantity not in explained
        ]
        reported: set[tuple[int, str]] = set()
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
                difference = _difference(quantity, expected, resumed)
                yield f"rank {rank}: {quantity}: {difference} {when}"

    def _equal(self, quantity: str, expected: Snapshot, actual: Snapshot) -> bool:
        """Tell whether a quantity of one rank is equal in two runs.

        On a GPU there is a tolerance.
        """
        before = _READERS[quantity](expected)
        after = _READERS[quantity](actual)
        if quantity == "extra_state":
            # A script whose function has returned has no variables in its last step.
            before, after = _common(before, after), _common(after, before)
        if self.through.device == "cpu" or quantity in {"scheduler", "data"}:
            return bool(before == after)
        if quantity in _EXACT:
            # On a GPU they are not compared.
            return True
        if len(before) != len(after):
            return False
        for number, other in zip(before, after, strict=True):
            if not math.isclose(number, other, rel_tol=TOLERANCE):
                return False
        return True


def resume_roundtrip(
    script: str | Path,
    args: Sequence[str | Path],
    *,
    resume: Sequence[str | Path],
    save_at: int,
    total: int,
    same: Sequence[str] = SAME,
    reshard_to: int | None = None,
    host: Host | None = None,
    **settings: Any,
) -> RoundTrip:
    """Run the script to its end, again until it has saved, and resumed; all of ``same`` must agree.

    All runs get the same total number of steps, so that learning rates agree; the probe stops the
    one that saves. With ``save_at=total``, where the resumed run only evaluates, and with
    ``reshard_to`` the loaded values are compared with the saved ones instead of the steps.

    Args:
        script: As for ``launch``.
        args: The arguments of all runs, with ``{output}`` (the directory of the run), ``{steps}``
            and ``{save_at}``.
        resume: Further arguments of the resumed run, with ``{checkpoint}`` for the path that was
            saved. Of several files by ``torch.save`` it is their directory.
        save_at: The step after which the checkpoint is written.
        total: The number of steps of the whole training.
        same: The quantities that must agree, of ``SAME``.
        reshard_to: The number of ranks of the resumed run, if it is another.
        host: As for ``launch``.
        **settings: Further arguments of ``launch``.

    Raises:
        Incompatible: With the differences.
        RunFailedError: If a run fails.
        UsageProblem: For a wrong argument.
    """
    _check_arguments(
        args=args, resume=resume, same=same, save_at=save_at, total=total, reshard_to=reshard_to
    )
    _check_settings(settings)
    host = host or Host.here()
    replacements = {"steps": str(total), "save_at": str(save_at)}
    runs: list[ScriptRun] = []

    def run(output: Path, *more: str, **others: Any) -> ScriptRun:
        of_this_run = {**replacements, "output": str(output)}
        arguments = [_filled(argument, of_this_run) for argument in (*args, *more)]
        runs.append(
            launch(script, *arguments, host=host, watch_steps=total, **{**settings, **others})
        )
        return runs[-1]

    stopped_output = host.new_directory("stopped")
    through_output = host.new_directory("through")

    def run_all() -> RoundTrip:
        stopped = run(stopped_output, stop_after=save_at)
        through = stopped
        if save_at < total:
            through = run(through_output)
        checkpoint = _checkpoint(stopped, save_at)
        if checkpoint is None:
            raise Incompatible(
                f"{_missing_checkpoint(stopped, save_at)}\nlogs: {stopped.directory}"
            )
        more = [_filled(argument, {"checkpoint": checkpoint}) for argument in resume]
        others: dict[str, Any] = {}
        if reshard_to:
            others["world_size"] = reshard_to
        try:
            resumed = run(stopped_output, *more, **others)
        except RunFailedError as failure:
            message = f"the run that was to go on from {checkpoint} failed\n\n{failure}"
            raise RunFailedError(message, hard=failure.hard) from None
        trip = RoundTrip(
            through, stopped, resumed, save_at, total, tuple(same), resharded=bool(reshard_to)
        )
        trip.check()
        return trip

    try:
        return run_all()
    except (Incompatible, RunFailedError):
        # The message is about checkpoints and logs there.
        leave_directory(stopped_output)
        leave_directory(through_output)
        for done in runs:
            leave_directory(done.directory)
        raise


def _check_settings(settings: Mapping[str, Any]) -> None:
    """Raise UsageProblem for an argument of ``launch`` that ``resume_roundtrip`` sets itself."""
    for name in ("watch_steps", "stop_after", "allow_failure", "fails"):
        if name in settings:
            raise UsageProblem(f"resume_roundtrip takes no {name}: it says that of each run itself")


def _check_arguments(
    *,
    args: object,
    resume: object,
    same: Sequence[str],
    save_at: object,
    total: object,
    reshard_to: object,
) -> None:
    """Raise UsageProblem for the first argument of ``resume_roundtrip`` that is wrong."""
    for name, value in (("args", args), ("resume", resume), ("same", same)):
        is_list = isinstance(value, Iterable) and not isinstance(value, str)
        check_argument(name, value, is_list, "expected a list of texts")
    known = bool(same) and set(same) <= set(SAME)
    within = isinstance(save_at, int) and isinstance(total, int) and 0 < save_at <= total
    positive = isinstance(reshard_to, int) and reshard_to > 0
    known_names = ", ".join(SAME)
    check_argument("same", list(same), known, f"known are {known_names}")
    check_argument("save_at", save_at, within, f"expected 1 to total={total!r} steps")
    check_argument("reshard_to", reshard_to, reshard_to is None or positive, RANKS)


def _checkpoint(run: ScriptRun, save_at: int) -> str | None:
    """Return the path of what was saved after that step, None without one.

    A checkpoint that all ranks wrote comes first. Of several files of single ranks it is their
    directory.
    """
    checkpoints = []
    files = []
    for event in run.saved():
        if event.index // STRIDE != save_at:
            continue
        files.append(event.path)
        if event.everyone:
            checkpoints.append(event.path)
    if checkpoints:
        return checkpoints[0]
    return os.path.commonpath(files) if files else None


def _missing_checkpoint(run: ScriptRun, save_at: int) -> str:
    """Return a message that there is no checkpoint after that step.

    It names the steps after which there are some.
    """
    lines = [f"no checkpoint was found after step {save_at}; expected one by {CHECKPOINT_CALLS}"]
    steps = sorted({event.index // STRIDE for event in run.saved()})
    if steps:
        steps_text = ", ".join(map(str, steps))
        lines.append(f"found after step {steps_text}")
    return "\n".join(lines)


def _filled(template: str | Path, replacements: Mapping[str, str]) -> str:
    """Return the argument with each ``{name}`` replaced by its value."""
    argument = str(template)
    for name, value in replacements.items():
        argument = argument.replace(f"{{{name}}}", value)
    return argument


def _steps_taken(run: ScriptRun) -> int:
    return max(run.trace.indices("step"), default=0) // STRIDE


def _step(run: ScriptRun, nth: int) -> tuple[Snapshot, ...]:
    return run.trace.at_index((nth + 1) * STRIDE)


def _at_save(run: ScriptRun, save_at: int) -> tuple[Snapshot, ...]:
    """Return the snapshots of the save after that step.

    Where one rank alone has saved, they are those of the step.
    """
    for index in run.trace.indices("save"):
        if index // STRIDE == save_at:
            return run.trace.at_index(index)
    return run.trace.at_index(save_at * STRIDE)


def _at_load(run: ScriptRun) -> tuple[Snapshot, ...]:
    """Return the snapshots of the load.

    Without one they are those before the first step: a file by ``torch.save`` is loaded by then.
    """
    return run.trace.at("load") or run.trace.at("build")


def _difference(quantity: str, expected: Snapshot, resumed: Snapshot) -> str:
    """Describe a difference: by both values if they are short, or the first name that differs."""
    before = _READERS[quantity](expected)
    after = _READERS[quantity](resumed)
    if quantity in {"losses", "grad_norms"}:
        return f"{_numbers(after)} instead of {_numbers(before)}"
    if quantity == "parameters":
        return _differing_values(before, after)
    if quantity == "optimizer":
        return _differing_optimizers(before, after)
    if quantity == "scheduler":
        return f"{after!r} instead of {before!r}"
    if quantity == "extra_state":
        names = [name for name in before if name in after and before[name] != after[name]]
        return f"{', '.join(names)} differs"
    return {"rng": "another random state", "data": "fed other data"}[quantity]


def _common(values: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values whose names the others have too."""
    return {name: value for name, value in values.items() if name in others}


def _differing_optimizers(before: _OptimizerValues, after: _OptimizerValues) -> str:
    """Describe how two optimizers differ: in their state, else in the numbers of their groups."""
    if before.states != after.states:
        return _differing_values(before.states, after.states)
    return f"groups are {after.param_groups} instead of {before.param_groups}"


def _differing_values(before: Mapping[str, _StoredValue], after: Mapping[str, _StoredValue]) -> str:
    """Describe in how many tensors two runs differ.

    The first of these is named, with its dtypes if they differ.
    """
    differing = []
    for name in sorted({*before, *after}):
        if before.get(name) != after.get(name):
            differing.append(name)
    first = differing[0]
    missing = _StoredValue(digest="", dtype="nothing")
    dtype_before = before.get(first, missing).dtype
    dtype_after = after.get(first, missing).dtype
    stored = ""
    if dtype_before != dtype_after:
        stored = f" ({dtype_after} instead of {dtype_before})"
    counted = f"{len(differing)} of {len(before)} values differ"
    return f"{counted}, first {first!r}{stored},"


def _numbers(values: Sequence[float | None]) -> str:
    if not values:
        return "none"
    texts: list[str] = []
    for value in values:
        if value is None:
            texts.append("none")
        else:
            texts.append(f"{value:.8g}")
    return ", ".join(texts)
