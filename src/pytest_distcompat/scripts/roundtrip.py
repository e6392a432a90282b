"""A script that is stopped and goes on from its checkpoint: does it train as if it had never stopped?"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_distcompat.checks._base import pairs
from pytest_distcompat.checks._values import differences, other_dtypes, settings, values
from pytest_distcompat.failures import Incompatible, RunFailedError, UsageProblem
from pytest_distcompat.scripts.launching import Host, check_ranks, launch
from pytest_distcompat.scripts.recorder import STRIDE
from pytest_distcompat.scripts.result import ScriptRun
from pytest_distcompat.trace import Snapshot, StateInfo

#: What may be asked to be the same, step by step and rank by rank.
SAME = ("losses", "grad_norms", "parameters", "optimizer", "scheduler", "rng", "data")
#: On a GPU sums are not made in a fixed order: how far losses and gradient norms may then be apart, relative.
TOLERANCE = 1e-4
#: What writes a checkpoint that the probe sees as one.
CHECKPOINTS = (
    "Accelerator.save_state, transformers.Trainer, an engine's save_checkpoint, torch.distributed.checkpoint's save"
)
#: What is only then compared bit by bit.
_EXACT = ("parameters", "optimizer", "rng")


@dataclass(frozen=True)
class RoundTrip:
    """The three runs: ``through`` never stopped, ``stopped`` left after the checkpoint, ``resumed`` went on from it."""

    through: ScriptRun
    stopped: ScriptRun
    resumed: ScriptRun
    save_at: int
    total: int
    same: tuple[str, ...]
    resharded: bool = False

    @property
    def left(self) -> int:
        """How many steps the resumed run is to take; 0 of one that only evaluates what it read."""
        return self.total - self.save_at

    @property
    def findings(self) -> list[str]:
        """What is wrong; first of all, if the resumed run does not start at the next step, nothing but that."""
        for title, run in (("run", self.through), ("stopped run", self.stopped), ("resumed run", self.resumed)):
            problem = run.unprobed(trains=run is not self.resumed or self.left > 0)
            if problem:
                return [f"the {title}: {problem}"]
        misplaced = list(self._start())
        if misplaced:
            return misplaced
        steps = list(self._steps())
        return list(dict.fromkeys([*self._apart(), *self._loaded(explain=bool(steps)), *steps]))

    def check(self) -> None:
        """Raise Incompatible with the findings, if there are any."""
        findings = self.findings
        if findings:
            runs = (self.through, self.stopped, self.resumed)
            logs = (f"logs: {one.directory}" for one in runs)
            hard = any(one.hard for one in runs)
            raise Incompatible("\n".join((*findings, *self.resumed.labels, *logs)), hard=hard)

    def _start(self) -> Iterator[str]:
        """The resumed run starts at the next step: it takes those that are left, no more and no less, on what was saved."""
        taken = _taken(self.resumed)
        if _taken(self.through) != self.total:
            yield f"the run took {_taken(self.through)} steps; expected total={self.total}"
        elif _taken(self.stopped) != self.save_at:
            yield f"the stopped run took {_taken(self.stopped)} steps; expected save_at={self.save_at}"
        elif taken == self.total:
            told = f"the resumed run took {taken} steps, all of them: it started again at step 0"
            yield f"{told}; expected it to start at step {self.save_at + 1}"
        elif taken != self.left:
            yield f"the resumed run took {taken} steps; {self.left} were left after step {self.save_at}"

    def _apart(self) -> Iterator[str]:
        """Two runs from the start must be alike for a third to be compared with them."""
        for nth in range(self.save_at):
            for one, other in pairs(_step(self.through, nth), _step(self.stopped, nth)):
                wrong = [what for what in ("losses", "data") if not self._alike(what, one, other)]
                if wrong:
                    told = " and ".join(wrong)
                    yield (
                        f"rank {one.rank}: {told} differ in step {nth + 1} of two runs from the start: the script is not "
                        "repeatable (is a seed missing?)"
                    )
                    return

    def _loaded(self, *, explain: bool) -> Iterator[str]:
        """Values as a whole, whatever number of ranks they are split over; where steps are compared, to ``explain`` them."""
        saved, loaded = (_at_rest(run, self.save_at) for run in (self.stopped, self.resumed))
        if not loaded:
            yield "the resumed run read no checkpoint by any of the calls that are known"
        elif explain or self.resharded or self.stopped.device != "cpu" or not self.left:
            states, on_import = "optimizer" in self.same, f"after the load at {self.resumed.trace.world_size} ranks"
            was, now = values(self.stopped.trace, saved), values(self.resumed.trace, loaded)
            yield from differences(was, now, on_import, states=states)
            yield from other_dtypes(was, now, on_import, states=states)
            if not self.left and not self.resharded and "scheduler" in self.same:
                yield from settings(saved, loaded, on_import)

    def _steps(self) -> Iterator[str]:
        """Step by step what the run that never stopped had; of each kind the first difference on each rank."""
        if self.resharded:
            return
        found: set[tuple[int, str]] = set()
        for number in range(self.save_at, self.total):
            whole, resumed = _step(self.through, number), _step(self.resumed, number - self.save_at)
            for one, other in pairs(whole, resumed):
                for what in self.same:
                    if (one.rank, what) not in found and not self._alike(what, one, other):
                        found.add((one.rank, what))
                        place = f"in step {number + 1}, {number + 1 - self.save_at} after the load"
                        yield f"rank {one.rank}: {what}: {_told(what, one, other)} {place}"

    def _alike(self, what: str, one: Snapshot, other: Snapshot) -> bool:
        was, now = _of(what, one), _of(what, other)
        if self.through.device == "cpu" or what in {"scheduler", "data"}:
            return bool(was == now)
        if what in _EXACT:
            return True
        return len(was) == len(now) and all(
            math.isclose(a, b, rel_tol=TOLERANCE) for a, b in zip(was, now, strict=True)
        )


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
    """Run the script through, once more until it has saved, and from there on; all of ``same`` must agree.

    In ``args``, ``{output}`` stands for the directory of a run, ``{steps}`` for ``total``, ``{save_at}`` for itself;
    ``resume`` is what the resumed run is told besides, with ``{checkpoint}`` for what was saved. All are told the same number
    of steps, so that schedules agree; the one that saves is ended by the probe. ``reshard_to`` resumes on as many ranks, and
    then what is loaded is compared with what was saved, as a whole, instead of the steps. So it is with ``save_at=total``, where
    the resumed run only evaluates what it loads, and no run through is needed. ``settings`` are those of ``launch``.

    Raises Incompatible with what differs, RunFailedError if a run fails, UsageProblem for a wrong word.
    """
    _check(args=args, resume=resume, same=same, save_at=save_at, total=total, reshard_to=reshard_to, settings=settings)
    where = host or Host.here()
    words = {"steps": str(total), "save_at": str(save_at)}

    def run(output: Path, *more: str, **others: Any) -> ScriptRun:
        told = [_filled(argument, {**words, "output": str(output)}) for argument in (*args, *more)]
        return launch(script, *told, host=where, watch_steps=total, **{**settings, **others})

    output = where.new_directory("stopped")
    stopped = run(output, stop_after=save_at)
    through = run(where.new_directory("through")) if save_at < total else stopped
    saved = [event for event in stopped.saved() if event["everyone"] and event["index"] // STRIDE == save_at]
    if not saved:
        raise Incompatible(f"{_unseen(stopped, save_at)}\nlogs: {stopped.directory}")
    more = [_filled(argument, {"checkpoint": str(saved[0]["path"])}) for argument in resume]
    try:
        resumed = run(output, *more, **({"world_size": reshard_to} if reshard_to else {}))
    except RunFailedError as failure:
        told = f"the run that was to go on from {saved[0]['path']} failed\n\n{failure}"
        raise RunFailedError(told, hard=failure.hard) from None
    trip = RoundTrip(through, stopped, resumed, save_at, total, tuple(same), resharded=bool(reshard_to))
    trip.check()
    return trip


def _check(
    *,
    args: Sequence[str | Path],
    resume: Sequence[str | Path],
    same: Sequence[str],
    save_at: int,
    total: int,
    reshard_to: object,
    settings: Mapping[str, Any],
) -> None:
    """Raise UsageProblem for what cannot be meant. A text would be taken for its letters; to compare nothing always passes."""
    for name, words in (("args", args), ("resume", resume), ("same", same)):
        if isinstance(words, str) or not isinstance(words, Iterable):
            raise UsageProblem(f"{name}={words!r}: expected a list of texts")
    if not same or any(name not in SAME for name in same):
        raise UsageProblem(f"same={list(same)!r}: known are {', '.join(SAME)}")
    if not isinstance(save_at, int) or not isinstance(total, int) or not 0 < save_at <= total:
        raise UsageProblem(f"save_at={save_at!r} of total={total!r} steps")
    if reshard_to is not None:
        check_ranks("reshard_to", reshard_to)
    ours = [name for name in ("watch_steps", "stop_after", "allow_failure", "fails") if name in settings]
    if ours:
        raise UsageProblem(f"resume_roundtrip takes no {ours[0]}: it says that of each run itself")


def _unseen(run: ScriptRun, save_at: int) -> str:
    """That there was no checkpoint after that step, and what there was."""
    lines = [f"no checkpoint was seen after step {save_at}; expected one by {CHECKPOINTS}"]
    steps = sorted({event["index"] // STRIDE for event in run.saved() if event["everyone"]})
    if steps:
        lines.append(f"seen after step {', '.join(map(str, steps))}")
    files = [event["path"] for event in run.saved() if not event["everyone"] and event["index"] // STRIDE == save_at]
    if files:
        told = "of which nobody can say that training goes on from them alone"
        lines.append(f"then there were files of torch.save and save_pretrained, {told}: {', '.join(files)}")
    return "\n".join(lines)


def _filled(given: str | Path, words: Mapping[str, str]) -> str:
    argument = str(given)
    for word, value in words.items():
        argument = argument.replace(f"{{{word}}}", value)
    return argument


def _taken(run: ScriptRun) -> int:
    return max((snapshot.index // STRIDE for snapshot in run.trace.snapshots if snapshot.action == "step"), default=0)


def _step(run: ScriptRun, nth: int) -> tuple[Snapshot, ...]:
    return run.trace.at_index((nth + 1) * STRIDE)


def _at_rest(run: ScriptRun, save_at: int) -> tuple[Snapshot, ...]:
    """The snapshots of the save after that step; of a run that did not get there, those of its load."""
    saved = [m for m in run.trace.snapshots if m.action == "save" and m.index // STRIDE == save_at]
    return run.trace.at_index(saved[0].index) if saved and not run.trace.at("load") else run.trace.at("load")


def _of(what: str, snapshot: Snapshot) -> Any:
    """What is compared of one rank in one step."""
    model, optimizer = snapshot.model, snapshot.optimizer
    if what == "losses":
        return (snapshot.loss,)
    if what == "grad_norms":
        return tuple(math.sqrt(step.square) for step in snapshot.steps)
    if what == "parameters":
        return {info.name: (info.digest, info.dtype) for info in (*model.parameters, *model.buffers)} if model else {}
    if what == "optimizer":
        states = (*optimizer.states, *optimizer.masters) if optimizer else ()
        held = {f"{state.key} of {state.owner}": (state.digest, _dtype(state)) for state in states}
        return held, optimizer and optimizer.param_groups
    if what == "scheduler":
        return snapshot.scheduler
    return snapshot.rng if what == "rng" else snapshot.inputs


def _dtype(state: StateInfo) -> str:
    """That of a tensor; a number that counts may come back as one."""
    return "" if state.numel == 1 else state.dtype


def _told(what: str, one: Snapshot, other: Snapshot) -> str:
    """Both sides where they are short, else what differs."""
    was, now = _of(what, one), _of(what, other)
    if what in {"losses", "grad_norms"}:
        return f"{_numbers(now)} instead of {_numbers(was)}"
    if what == "scheduler":
        return f"{now!r} instead of {was!r}"
    if what == "optimizer" and was[0] == now[0]:
        return f"groups are {now[1]} instead of {was[1]}"
    if what in {"parameters", "optimizer"}:
        was, now = (was, now) if what == "parameters" else (was[0], now[0])
        wrong = sorted(name for name in {*was, *now} if was.get(name) != now.get(name))
        (_, old), (_, new) = was.get(wrong[0], ("", "nothing")), now.get(wrong[0], ("", "nothing"))
        stored = f" ({new} instead of {old})" if old != new else ""
        return f"{len(wrong)} of {len(was)} values differ, first {wrong[0]!r}{stored},"
    return "another random state" if what == "rng" else "fed other data"


def _numbers(values: Sequence[float | None]) -> str:
    return ", ".join("none" if value is None else f"{value:.8g}" for value in values) or "none"
