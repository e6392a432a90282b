"""Round trip of a script that is stopped and resumed: check that it trains as if it had never stopped."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_distcompat.checks import message, pairs
from pytest_distcompat.checks._values import differences, other_dtypes, settings, values
from pytest_distcompat.ext.scripts.launching import RANKS, Host, check_arguments, launch, leave_directory
from pytest_distcompat.ext.scripts.recorder import STRIDE
from pytest_distcompat.ext.scripts.result import ScriptRun
from pytest_distcompat.failures import Incompatible, RunFailedError, UsageProblem, hides_frames
from pytest_distcompat.trace import Snapshot

#: pytest looks for this name: https://docs.pytest.org/en/stable/example/simple.html
__tracebackhide__ = hides_frames


def _optimizer_of(snapshot: Snapshot) -> Any:
    states = (*snapshot.states, *snapshot.masters)
    # A load may return a single number as a tensor, whose dtype says nothing.
    held = {f"{one.key} of {one.owner}": (one.digest, "" if one.numel == 1 else one.dtype) for one in states}
    return held, snapshot.param_groups


#: How each quantity of one rank in one step is read.
_READERS: Mapping[str, Callable[[Snapshot], Any]] = {
    "losses": lambda one: (one.loss,),
    "grad_norms": lambda one: tuple(math.sqrt(step.square) for step in one.steps),
    "parameters": lambda one: {info.name: (info.digest, info.dtype) for info in (*one.parameters, *one.buffers)},
    "optimizer": _optimizer_of,
    "scheduler": lambda one: one.scheduler,
    "rng": lambda one: one.rng,
    "data": lambda one: one.inputs,
}
#: The quantities that can be compared, step by step and rank by rank.
SAME = tuple(_READERS)
#: The order in which differences of one step are reported: what all others follow from comes first.
_CAUSES_FIRST = ("data", *(quantity for quantity in SAME if quantity != "data"))
#: Relative tolerance of losses and gradient norms on a GPU, where the order of sums is not fixed.
TOLERANCE = 1e-4
#: Calls that write a checkpoint which the probe recognizes.
CHECKPOINT_CALLS = (
    "Accelerator.save_state, transformers.Trainer, an engine's save_checkpoint, torch.distributed.checkpoint's save, "
    "torch.save"
)
#: Quantities that are compared bit by bit, and on the CPU only.
_EXACT = ("parameters", "optimizer", "rng")


@dataclass(frozen=True)
class RoundTrip:
    """Three runs: ``through`` never stopped, ``stopped`` ended after the checkpoint, ``resumed`` loaded it."""

    through: ScriptRun
    stopped: ScriptRun
    resumed: ScriptRun
    save_at: int
    total: int
    same: tuple[str, ...]
    resharded: bool = False

    @property
    def steps_left(self) -> int:
        """Return how many steps the resumed run must take; 0 if it only evaluates the model that it loads."""
        return self.total - self.save_at

    @property
    def findings(self) -> list[str]:
        """Return what is wrong. If a run took the wrong steps, that is the only finding."""
        for title, run in (("run", self.through), ("stopped run", self.stopped), ("resumed run", self.resumed)):
            if problem := run.missing_evidence(trains=run is not self.resumed or self.steps_left > 0):
                return [f"the {title}: {problem}"]
        if misplaced := list(self._wrong_steps()):
            return misplaced
        differences = list(self._differing_steps())
        return list(dict.fromkeys([*self._not_repeatable(), *self._loaded(explain=bool(differences)), *differences]))

    def check(self) -> None:
        """Raise Incompatible with the findings, if there are any."""
        if findings := self.findings:
            runs = (self.through, self.stopped, self.resumed)
            logs = (f"logs: {run.directory}" for run in runs)
            text = "\n".join((message(findings), *self.resumed.labels, *logs))
            raise Incompatible(text, hard=any(run.hard for run in runs))

    def _wrong_steps(self) -> Iterator[str]:
        """Yield a finding if a run took another number of steps than it should; the resumed run takes those that are left."""
        taken = _steps_taken(self.resumed)
        if _steps_taken(self.through) != self.total:
            yield f"the run took {_steps_taken(self.through)} steps; expected total={self.total}"
        elif _steps_taken(self.stopped) != self.save_at:
            yield f"the stopped run took {_steps_taken(self.stopped)} steps; expected save_at={self.save_at}"
        elif taken == self.total:
            finding = f"the resumed run took {taken} steps, all of them: it started again at step 0"
            yield f"{finding}; expected it to start at step {self.save_at + 1}"
        elif taken != self.steps_left:
            yield f"the resumed run took {taken} steps; {self.steps_left} were left after step {self.save_at}"

    def _not_repeatable(self) -> Iterator[str]:
        """Yield a finding if the two runs from the start differ: then a third cannot be compared with them."""
        for nth in range(self.save_at):
            for one, other in pairs(_step(self.through, nth), _step(self.stopped, nth)):
                if wrong := [quantity for quantity in ("losses", "data") if not self._equal(quantity, one, other)]:
                    finding = f"{' and '.join(wrong)} differ in step {nth + 1} of two runs from the start"
                    yield f"rank {one.rank}: {finding}: the script is not repeatable (is a seed missing?)"
                    return

    def _loaded(self, *, explain: bool) -> Iterator[str]:
        """Yield differences between saved and loaded values on any number of ranks, or to ``explain`` those of steps."""
        saved, loaded = _at_save(self.stopped, self.save_at), _at_load(self.resumed)
        if not loaded:
            yield "the resumed run read no checkpoint by any of the calls that are known"
        elif explain or self.resharded or self.stopped.device != "cpu" or not self.steps_left:
            states, when = "optimizer" in self.same, f"after the load at {self.resumed.trace.world_size} ranks"
            was, now = values(self.stopped.trace, saved), values(self.resumed.trace, loaded)
            yield from differences(was, now, when, states=states)
            yield from other_dtypes(was, now, when, states=states)
            if not self.steps_left and not self.resharded and "scheduler" in self.same:
                yield from settings(saved, loaded, when)

    def _differing_steps(self) -> Iterator[str]:
        """Yield the first difference of each quantity on each rank from the run that never stopped."""
        if self.resharded:
            return
        reported: set[tuple[int, str]] = set()
        for number in range(self.save_at, self.total):
            expected, resumed = _step(self.through, number), _step(self.resumed, number - self.save_at)
            quantities = [quantity for quantity in _CAUSES_FIRST if quantity in self.same]
            for quantity, (one, other) in itertools.product(quantities, list(pairs(expected, resumed))):
                if (one.rank, quantity) not in reported and not self._equal(quantity, one, other):
                    reported.add((one.rank, quantity))
                    when = f"in step {number + 1}, {number + 1 - self.save_at} after the load"
                    yield f"rank {one.rank}: {quantity}: {_difference(quantity, one, other)} {when}"

    def _equal(self, quantity: str, one: Snapshot, other: Snapshot) -> bool:
        """Tell whether a quantity is equal on two ranks, within the tolerance on a GPU."""
        was, now = _READERS[quantity](one), _READERS[quantity](other)
        if self.through.device == "cpu" or quantity in {"scheduler", "data"}:
            return bool(was == now)
        close = (math.isclose(a, b, rel_tol=TOLERANCE) for a, b in zip(was, now, strict=False))
        return quantity in _EXACT or (len(was) == len(now) and all(close))


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
    """Run the script to its end, again until it has saved, and resumed from there; all of ``same`` must agree.

    All runs get the same total number of steps, so that learning rates agree; the probe stops the one that saves. With
    ``save_at=total``, where the resumed run only evaluates, and with ``reshard_to`` the loaded values are compared with
    the saved ones instead of the steps.

    Args:
        script: As for ``launch``.
        args: The arguments of all runs, with ``{output}`` (the directory of the run), ``{steps}`` and ``{save_at}``.
        resume: Further arguments of the resumed run, with ``{checkpoint}`` for the path that was saved. Of several files by
            ``torch.save`` it is their directory.
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
    for name, one in (("args", args), ("resume", resume), ("same", same)):
        is_list = isinstance(one, Iterable) and not isinstance(one, str)
        check_arguments(**{name: (one, is_list, "expected a list of texts")})
    steps = f"expected 1 to total={total!r} steps"
    check_arguments(
        same=(list(same), bool(same) and {*same} <= {*SAME}, f"known are {', '.join(SAME)}"),
        save_at=(save_at, isinstance(save_at, int) and isinstance(total, int) and 0 < save_at <= total, steps),
        reshard_to=(reshard_to, reshard_to is None or (isinstance(reshard_to, int) and reshard_to > 0), RANKS),
    )
    reserved = [name for name in ("watch_steps", "stop_after", "allow_failure", "fails") if name in settings]
    if reserved:
        raise UsageProblem(f"resume_roundtrip takes no {reserved[0]}: it says that of each run itself")
    host = host or Host.here()
    replacements = {"steps": str(total), "save_at": str(save_at)}

    def run(output: Path, *more: str, **others: Any) -> ScriptRun:
        arguments = [_filled(argument, {**replacements, "output": str(output)}) for argument in (*args, *more)]
        runs.append(launch(script, *arguments, host=host, watch_steps=total, **{**settings, **others}))
        return runs[-1]

    runs: list[ScriptRun] = []
    output, whole = host.new_directory("stopped"), host.new_directory("through")

    def go() -> RoundTrip:
        stopped = run(output, stop_after=save_at)
        through = run(whole) if save_at < total else stopped
        checkpoint = _checkpoint(stopped, save_at)
        if checkpoint is None:
            raise Incompatible(f"{_missing_checkpoint(stopped, save_at)}\nlogs: {stopped.directory}")
        more = [_filled(argument, {"checkpoint": checkpoint}) for argument in resume]
        try:
            resumed = run(output, *more, **({"world_size": reshard_to} if reshard_to else {}))
        except RunFailedError as failure:
            message = f"the run that was to go on from {checkpoint} failed\n\n{failure}"
            raise RunFailedError(message, hard=failure.hard) from None
        trip = RoundTrip(through, stopped, resumed, save_at, total, tuple(same), resharded=bool(reshard_to))
        trip.check()
        return trip

    try:
        return go()
    except (Incompatible, RunFailedError):
        # The message is about checkpoints and logs there.
        for directory in (output, whole, *(done.directory for done in runs)):
            leave_directory(directory)
        raise


def _checkpoint(run: ScriptRun, save_at: int) -> str | None:
    """Return the path of what was saved after that step, None without one.

    A checkpoint that all ranks wrote comes first. Of several files of single ranks it is their directory.
    """
    saved = [event for event in run.saved() if event.index // STRIDE == save_at]
    whole = [event.path for event in saved if event.everyone]
    if whole:
        return whole[0]
    files = [event.path for event in saved]
    return os.path.commonpath(files) if files else None


def _missing_checkpoint(run: ScriptRun, save_at: int) -> str:
    """Return a message that there is no checkpoint after that step, with the steps after which there are some."""
    lines = [f"no checkpoint was found after step {save_at}; expected one by {CHECKPOINT_CALLS}"]
    steps = sorted({event.index // STRIDE for event in run.saved()})
    if steps:
        lines.append(f"found after step {', '.join(map(str, steps))}")
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
    """Return the snapshots of the save after that step; where one rank alone has saved, those of the step."""
    saved = [index for index in run.trace.indices("save") if index // STRIDE == save_at]
    return run.trace.at_index(saved[0] if saved else save_at * STRIDE)


def _at_load(run: ScriptRun) -> tuple[Snapshot, ...]:
    """Return the snapshots of the load; without one those before the first step: a file by ``torch.save`` is loaded by then."""
    return run.trace.at("load") or run.trace.at("build")


def _difference(quantity: str, one: Snapshot, other: Snapshot) -> str:
    """Describe a difference: by both values if they are short, else by the first name that differs."""
    was, now = _READERS[quantity](one), _READERS[quantity](other)
    if quantity in {"losses", "grad_norms"}:
        return f"{_numbers(now)} instead of {_numbers(was)}"
    if quantity == "scheduler":
        return f"{now!r} instead of {was!r}"
    if quantity == "optimizer" and was[0] == now[0]:
        return f"groups are {now[1]} instead of {was[1]}"
    if quantity in {"parameters", "optimizer"}:
        was, now = (was, now) if quantity == "parameters" else (was[0], now[0])
        wrong = sorted(name for name in {*was, *now} if was.get(name) != now.get(name))
        (_, old), (_, new) = was.get(wrong[0], ("", "nothing")), now.get(wrong[0], ("", "nothing"))
        stored = f" ({new} instead of {old})" if old != new else ""
        return f"{len(wrong)} of {len(was)} values differ, first {wrong[0]!r}{stored},"
    return "another random state" if quantity == "rng" else "fed other data"


def _numbers(values: Sequence[float | None]) -> str:
    return ", ".join("none" if value is None else f"{value:.8g}" for value in values) or "none"
