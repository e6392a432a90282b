"""``resume_roundtrip``: run a script to its end, run it until it has saved, and resume it.

Users call it in a test, through the fixture ``distcompat`` (``plugin``) or by
``pytest_distcompat.scripts``. A *run* is one launch of the script on all its ranks (``launch``).
With ``save_at=3, total=5`` there are three:

- the *stopped* run trains 3 of its 5 steps: the *probe*, the code that records the script from
  inside its processes, ends it right after the checkpoint of step 3, as a preempted job ends;
- the run *through* trains all 5 steps;
- the *resumed* run gets the path of the checkpoint and trains steps 4 and 5.

``RoundTrip`` (module ``roundtrip``) then compares what the probes of the three recorded. The caller
gets the ``RoundTrip``, or the exception ``Incompatible`` with all differences.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest_distcompat.ext.scripts.launch_arguments import RANKS, check_argument
from pytest_distcompat.ext.scripts.launching import Host, launch, leave_directory
from pytest_distcompat.ext.scripts.quantities import SAME
from pytest_distcompat.ext.scripts.recorder import STRIDE
from pytest_distcompat.ext.scripts.result import ScriptRun
from pytest_distcompat.ext.scripts.roundtrip import RoundTrip
from pytest_distcompat.failures import Incompatible, RunFailedError, UsageProblem, hides_frames

#: pytest looks for this name: https://docs.pytest.org/en/stable/example/simple.html
__tracebackhide__ = hides_frames

#: Calls that write a checkpoint which the probe recognizes.
CHECKPOINT_CALLS = (
    "Accelerator.save_state, transformers.Trainer, an engine's save_checkpoint, "
    "torch.distributed.checkpoint's save, torch.save"
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
        same: The quantities that must agree, by default all: ``losses``, ``grad_norms``,
            ``parameters``, ``optimizer``, ``scheduler``, ``rng``, ``data`` and ``extra_state``.
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
    launches = _Launches(script, args, save_at, total, host, settings)
    stopped_output = host.new_directory("stopped")
    through_output = host.new_directory("through")
    try:
        stopped = launches.run(stopped_output, stop_after=save_at)
        through = stopped
        # With ``save_at=total`` the stopped run has trained all steps, as a second one would.
        if save_at < total:
            through = launches.run(through_output)
        # The resumed run has the output directory of the stopped one, as a user's would.
        resumed = launches.resume(stopped, stopped_output, resume, reshard_to)
        trip = RoundTrip(
            through, stopped, resumed, save_at, total, tuple(same), resharded=bool(reshard_to)
        )
        trip.check()
    except (Incompatible, RunFailedError):
        # The message is about checkpoints and logs there.
        leave_directory(stopped_output)
        leave_directory(through_output)
        for done in launches.done:
            leave_directory(done.directory)
        raise
    return trip


@dataclass
class _Launches:
    """The launches of one script, with the arguments that all runs have."""

    script: str | Path
    #: The arguments of the script, with placeholders such as ``{steps}``.
    args: Sequence[str | Path]
    save_at: int
    total: int
    host: Host
    #: Further arguments of ``launch``.
    settings: Mapping[str, Any]
    #: The runs that have ended well so far.
    done: list[ScriptRun] = field(default_factory=list)

    def run(self, output: Path, *more: str, **others: Any) -> ScriptRun:
        """Launch the script.

        Args:
            output: The directory that takes the place of ``{output}``.
            *more: Further arguments of the script.
            **others: Arguments of ``launch`` for this run alone.
        """
        replacements = {
            "steps": str(self.total),
            "save_at": str(self.save_at),
            "output": str(output),
        }
        arguments = [_filled(argument, replacements) for argument in (*self.args, *more)]
        # The probe records every step in full, because each may be compared.
        run = launch(
            self.script,
            *arguments,
            host=self.host,
            watch_steps=self.total,
            **{**self.settings, **others},
        )
        self.done.append(run)
        return run

    def resume(
        self,
        stopped: ScriptRun,
        output: Path,
        arguments: Sequence[str | Path],
        reshard_to: int | None,
    ) -> ScriptRun:
        """Launch the script so that it goes on from the checkpoint of a stopped run.

        Args:
            stopped: The run that has written the checkpoint.
            output: As for ``run``.
            arguments: The further arguments of the script, with ``{checkpoint}``.
            reshard_to: The number of ranks, if it is another.

        Raises:
            Incompatible: There is no checkpoint.
            RunFailedError: The run failed; the message names the checkpoint.
        """
        checkpoint = _checkpoint(stopped, self.save_at)
        if checkpoint is None:
            problem = _missing_checkpoint(stopped, self.save_at)
            raise Incompatible(f"{problem}\nlogs: {stopped.directory}")
        more = [_filled(argument, {"checkpoint": checkpoint}) for argument in arguments]
        others: dict[str, Any] = {}
        if reshard_to:
            others["world_size"] = reshard_to
        try:
            return self.run(output, *more, **others)
        except RunFailedError as failure:
            message = f"the run that was to go on from {checkpoint} failed\n\n{failure}"
            raise RunFailedError(message, hard=failure.hard) from None


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
    """Return the path of what was saved after that step, such as ``.../checkpoint-3``.

    A checkpoint that all ranks wrote comes first. A script that only calls ``torch.save`` has
    files of single ranks: the path of the file, or of several their common directory. None if
    nothing was saved after the step.
    """
    checkpoints = []
    paths = []
    for event in run.saved():
        # The index of a snapshot or save is STRIDE (100) times the steps taken, and an offset.
        steps_taken = event.index // STRIDE
        if steps_taken != save_at:
            continue
        paths.append(event.path)
        if event.everyone:
            checkpoints.append(event.path)
    if checkpoints:
        return checkpoints[0]
    return os.path.commonpath(paths) if paths else None


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
    """Return the argument with each ``{name}`` replaced by its value.

    For example ``{save_at}`` by ``3``. Other braces stay: ``launch`` replaces ``{configuration}``.
    """
    argument = str(template)
    for name, value in replacements.items():
        argument = argument.replace(f"{{{name}}}", value)
    return argument
