"""``ScriptRun``: one run of a script, as ``launch`` returns it, and its verdicts by the checks.

A user's test calls ``launch("train.py", strategy="fsdp2")`` and then ``run.check("active",
"names")`` on the result. ``resume_roundtrip`` and ``parity`` read its ``trace``.

The input is the files of the run's directory. In each rank (process that trains) a *probe* recorded
*snapshots* there: what it read of model and optimizer after an *action*, such as the third
``step``. All snapshots of a run are its ``trace``. A *check* is a function of a trace and of a
*cell*, which says what should have run: ``fsdp2-fp32-w2`` is FSDP2 in float32 on 2 ranks. The
checks are those of the built-in suite (``pytest_distcompat.checks``); ``final_model_loadable``
alone is for scripts only. The result is a ``Verdict`` for each check: passed, failed with its
findings, or skipped where the check does not apply.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks import CHECKS
from pytest_distcompat.decode import decode
from pytest_distcompat.driver import Driver
from pytest_distcompat.events import Event, Start, of_kind
from pytest_distcompat.ext.scripts.environment import ProbeConfig
from pytest_distcompat.ext.scripts.events import Bridged, Output, ProbeFailed, Saved, UnseenModel
from pytest_distcompat.ext.scripts.final_model import check_final_model
from pytest_distcompat.ext.scripts.reading import read_in_a_process
from pytest_distcompat.failures import Incompatible, RunFailedError, UsageProblem, hides_frames
from pytest_distcompat.judge import judge, skipped
from pytest_distcompat.launch.forensics.ending import Ending
from pytest_distcompat.runner import run_trace
from pytest_distcompat.status import Status, Verdict
from pytest_distcompat.trace import FileInfo, RunTrace, Snapshot, Trace

_E = TypeVar("_E", bound=Event)

#: pytest looks for this name: https://docs.pytest.org/en/stable/example/simple.html
__tracebackhide__ = hides_frames

#: The checks that can judge one run of a script. The others need several runs, or actions that
#: only a driver has: a class by which a user runs a trainer in the built-in suite.
SCRIPT_CHECKS = ("active", "names", "optimizer", "dtypes", "memory", "units", "float8")
#: The check of the model that the script leaves in its output directory.
FINAL_MODEL_CHECK = "final_model_loadable"
#: The step that ``SCRIPT_CHECKS`` judge. In earlier steps a warm-up may change nothing, and a
#: gradient scaler may skip the update.
JUDGED_STEP = 3
#: The index of the first snapshot of files, which are read after the run: above those of all steps.
_FILES_INDEX = 10**9
#: Calls by which the probe sees a model.
MODEL_CALLS = (
    "Accelerator.prepare, deepspeed.initialize, DistributedDataParallel, "
    "FullyShardedDataParallel, fully_shard, torch.compile"
)


@dataclass(frozen=True)
class ScriptRun:
    """One run of a script on all its ranks."""

    #: How each rank ended, and the events that it logged.
    ending: Ending
    #: What should have been running, such as ``fsdp2-fp32-w2``; None if ``launch`` was given no
    #: strategy.
    cell: Cell | None
    #: Holds the logs and snapshots of the ranks.
    directory: Path
    #: ``cpu`` or ``cuda``.
    device: str
    #: Where the script should leave its model, if given.
    output: Path | None = None
    #: Returns the unwrapped name of a key in the script's files: the name that the parameter has
    #: in the model before DDP, FSDP or DeepSpeed wraps it.
    saved_name: Callable[[str], str] = lambda key: key

    @property
    def failed(self) -> bool:
        """Tell whether the launcher or any rank failed."""
        return self.ending.failed

    @property
    def hard(self) -> bool:
        """Tell whether the run failed by more than an exception: a crash or a hang.

        No declared expectation excuses such a failure.
        """
        return self.failed and self.ending.kind != "raised"

    def raise_if_failed(self) -> None:
        """Raise RunFailedError with a report of all ranks, if the launcher or any rank failed."""
        if self.failed:
            raise RunFailedError(self.text(), hard=self.hard)

    def raise_unless_failed(self, declared: str) -> None:
        """Raise an error unless the run failed as declared by ``launch(fails=...)``.

        Args:
            declared: A regular expression for the first line of the report, such as ``rank 1 raised
                ValueError``.

        Raises:
            Incompatible: The run did not fail.
            RunFailedError: It hung, or failed otherwise.
        """
        if not self.failed:
            raise Incompatible(
                f"all ranks ended well; expected the run to fail with {declared!r}\n{self.text()}"
            )
        if self.ending.timed_out or not re.search(declared, self.ending.headline()):
            raise RunFailedError(
                f"the run failed otherwise than with {declared!r}\n\n{self.text()}", hard=self.hard
            )

    def text(self) -> str:
        """Return a report of how the run ended.

        It names the changes of the CPU bridge (``labels``), the logs and the command that repeats
        the run.
        """
        parts = [
            self.ending.text(),
            *self.labels,
            f"logs: {self.directory}",
            f"this run alone: {self.ending.command}",
        ]
        return "\n".join(parts)

    @functools.cached_property
    def labels(self) -> tuple[str, ...]:
        """Return one line for each change that the CPU bridge has made to a library.

        The bridge makes accelerate and transformers run FSDP and DeepSpeed on CPU ranks.
        """
        lines = [f"CPU bridge: {change.what}" for change in self._logged(Bridged)]
        # Each once: all ranks log them.
        return tuple(dict.fromkeys(lines))

    def _logged(self, kind: type[_E]) -> list[_E]:
        """Return the events of that kind that any rank logged."""
        logged: list[_E] = []
        for events in self.ending.events.values():
            logged.extend(of_kind(kind, events))
        return logged

    @functools.cached_property
    def trace(self) -> RunTrace:
        """Return the snapshots of the run, without those of its files."""
        return run_trace("train", self.ending, self._assumed_cell)

    @property
    def losses(self) -> tuple[tuple[float | None, ...], ...]:
        """Return the losses that ``backward`` was called with: ``losses[rank][step]``.

        A loss is None if the step had none.
        """
        losses_by_rank: list[list[float | None]] = []
        for _ in range(self.trace.world_size):
            losses_by_rank.append([])
        for index in self.trace.indices("step"):
            for snapshot in self.trace.at_index(index):
                losses_by_rank[snapshot.rank].append(snapshot.loss)
        return tuple(tuple(losses) for losses in losses_by_rank)

    def output_of(self, rank: int) -> str:
        """Return the stdout and stderr of that rank; empty if the launcher writes no such files.

        torchrun writes them (``commands``); a command that starts ranks by ``mp.spawn`` does not.
        """
        logs = sorted(self.directory.glob(f"logs/*/attempt_0/{rank}/std*.log"))
        return "".join(path.read_text(encoding="utf-8", errors="replace") for path in logs)

    def check(self, *names: str) -> None:
        """Judge the run by these checks.

        They are ``active names optimizer dtypes memory units float8 final_model_loadable``.

        A check that does not apply to the run (``units`` under DDP, ``float8`` without fp8) is
        skipped; ``verdicts`` says why.

        Args:
            *names: The ids of the checks.

        Raises:
            Incompatible: With the findings of all checks; also if there was nothing to probe, or no
                check applies.
            UsageProblem: For an unknown name, or if ``launch`` was given no strategy.

        """
        verdicts = self.verdicts(*names)
        judged = []
        bad = []
        for verdict in verdicts:
            if verdict.status == "skipped":
                continue
            judged.append(verdict)
            if not verdict.ok:
                bad.append(verdict)
        if not judged:
            # A test of which every check is skipped would prove nothing.
            bad = verdicts
        if not bad:
            return
        paragraphs = []
        for verdict in bad:
            headline = f"{verdict.check} ({verdict.cell}): {verdict.status}"
            paragraphs.append(f"{headline}\n{verdict.message}")
        if self.failed:
            paragraphs.append(self.text())
        else:
            lines = (*self.labels, f"logs: {self.directory}")
            paragraphs.append("\n".join(lines))
        raise Incompatible("\n\n".join(paragraphs), hard=self.hard)

    def verdicts(self, *names: str) -> list[Verdict]:
        """Return one verdict for each check.

        It is ``skipped``, with the reason, if the check does not apply. Raises as ``check``.
        """
        known = (*SCRIPT_CHECKS, FINAL_MODEL_CHECK)
        if not names:
            raise UsageProblem(f"no check is named. Known: {', '.join(known)}")
        for name in names:
            if name not in known:
                raise UsageProblem(
                    f"{name!r} is no check of a script's run. Known: {', '.join(known)}"
                )
        return [self._verdict(name) for name in names]

    @property
    def _assumed_cell(self) -> Cell:
        """Return the cell; without a strategy DDP, as the least that any training does."""
        return self.cell or Cell("ddp", "fp32", len(self.ending.ranks))

    def _verdict(self, name: str) -> Verdict:
        """Return the verdict of the check of that name."""
        if self.cell is None and name != FINAL_MODEL_CHECK:
            raise UsageProblem(
                f"check {name!r}: launch() got no strategy, so nothing says what should run"
            )
        if self.failed:
            return self._verdict_of_failed_run(name)
        problem = self.missing_evidence()
        if problem:
            return Verdict(name, self._assumed_cell.id, Status.FAILED, problem)
        if name == FINAL_MODEL_CHECK:
            return self._verdict_on_final_model()
        return self._verdict_of_check(name)

    def _verdict_of_failed_run(self, name: str) -> Verdict:
        """Return the verdict of a check of a failed run: failed, crashed or hung, as the run."""
        status = Status.FAILED
        if self.ending.kind != "raised":
            status = Status.from_name(self.ending.kind)
        causes = [f"the run failed: {self.ending.headline()}"]
        probe_failure = self._probe_failure()
        if probe_failure:
            causes.append(probe_failure)
        return Verdict(name, self._assumed_cell.id, status, "\n".join(causes))

    def _verdict_on_final_model(self) -> Verdict:
        """Return the verdict on the model that the run left."""
        cell = self._assumed_cell
        # ``everyone``: all ranks have saved it together, as they do a checkpoint.
        checkpoints = [saved.path for saved in self.saved() if saved.everyone]
        findings = check_final_model(
            self.trace, cell, self.model_path(), checkpoints, self._read, saved_name=self.saved_name
        )
        status = Status.FAILED if findings else Status.PASSED
        return Verdict(FINAL_MODEL_CHECK, cell.id, status, "\n".join(findings))

    def _verdict_of_check(self, name: str) -> Verdict:
        """Return the verdict of one of ``SCRIPT_CHECKS`` on a run that ended well."""
        cell = self._assumed_cell
        check = CHECKS.get(name)
        reason = check.not_applicable(cell, Driver)
        if reason:
            return skipped(name, cell, f"the check does not apply: {reason}")
        too_short = self._too_short()
        if too_short:
            return Verdict(name, cell.id, Status.FAILED, too_short)
        run = self.trace
        if name == "names":
            # Only this check reads files, which takes seconds.
            run = self.trace_with_files
        trace = Trace("script", {run.name: run}, saves=self._should_save)
        return judge(check, cell, trace)

    def missing_evidence(self, *, trains: bool = True) -> str:
        """Return why the probe recorded nothing to judge; empty if it did.

        Without this a check would pass because it has seen nothing.

        Args:
            trains: Whether the run must have taken a step. A resumed run may only evaluate.
        """
        probe_failure = self._probe_failure()
        if probe_failure:
            return probe_failure
        if not ProbeConfig.read(self.directory).steps:
            return "nothing to probe: watch_steps=0 leaves the probe out"
        # The probe records ``build`` when the first optimizer step begins.
        if trains and not self.trace.at("build"):
            reason = "no optimizer of torch's stepped"
            unseen = self._logged(UnseenModel)
            if unseen:
                reason = f"{unseen[0].optimizer} stepped, on a model that nothing wrapped"
            return (
                f"nothing to probe: {reason}. "
                f"A model is seen when it passes through one of: {MODEL_CALLS}"
            )
        return ""

    def _probe_failure(self) -> str:
        """Return where the probe failed first, with the traceback; empty if it did not.

        A rank logs that. A process of the script that is no rank leaves a file instead.
        """
        message = "the probe itself failed, at {}, and saw no more from then on\n{}"
        for failed in self._logged(ProbeFailed):
            text = message.format(failed.where, failed.text)
            return f"rank {failed.rank}: {text}"
        for file in sorted(self.directory.glob("probe-*.failed")):
            # The file is ``at WHERE:``, a newline, and the traceback.
            written = file.read_text(encoding="utf-8").removeprefix("at ")
            where, _, failure = written.partition(":\n")
            return f"a process that is no rank: {message.format(where, failure)}"
        return ""

    def _too_short(self) -> str:
        """Return why the step that checks judge was not recorded in full; empty if it was."""
        watched = ProbeConfig.read(self.directory).steps
        if watched < JUDGED_STEP:
            problem = f"watch_steps={watched}: the check looks at step {JUDGED_STEP} in full"
            return f"{problem}; expected {JUDGED_STEP} or more"
        taken = len(self.trace.indices("step"))
        if taken < JUDGED_STEP:
            steps = f"{taken} optimizer step" if taken == 1 else f"{taken} optimizer steps"
            problem = f"the run took {steps}: the check looks at step {JUDGED_STEP}"
            return f"{problem}; let the script take {JUDGED_STEP} or more"
        return ""

    def saved(self) -> list[Saved]:
        """Return the last event of each path that was saved, in the order of their ``index``.

        The index is 100 times the steps taken until then, plus an offset, such as 10 for the first
        checkpoint after a step.
        """
        last_by_path = {saved.path: saved for saved in self._logged(Saved)}
        return sorted(last_by_path.values(), key=lambda saved: saved.index)

    def model_path(self) -> Path | None:
        """Return ``output``, or the path of the last model that the run saved.

        Models in its checkpoints do not count. None without a model.
        """
        if self.output is not None:
            return self.output
        # What all ranks save together is a checkpoint, and no final model.
        paths = [saved.path for saved in self.saved() if not saved.everyone]
        if not paths:
            # The output directories of trainers that the script made.
            paths = [output.path for output in self._logged(Output)]
        return Path(paths[-1]) if paths else None

    def _read(self, request: Mapping[str, Any]) -> Any:
        """Return the answer of ``reading`` to a request, such as ``{"kind": "files", ...}``.

        A process of its own reads the files, because this one does not import torch. It has the
        interpreter and working directory of the first rank that started.
        """
        starts = self._logged(Start)
        start = starts[0] if starts else None
        return read_in_a_process(start, self.directory, request)

    @functools.cached_property
    def trace_with_files(self) -> RunTrace:
        """Return the trace with one more snapshot for each saved checkpoint and file.

        They have the action ``files`` and indices after every step. Without a checkpoint it is one
        snapshot of all files.
        """
        snapshots: list[Snapshot] = []
        for nth, files in enumerate(self._written_files()):
            snapshots.append(Snapshot(0, "train", "files", _FILES_INDEX + nth, files=files))
        return replace(self.trace, snapshots=(*self.trace.snapshots, *snapshots))

    def _written_files(self) -> list[tuple[FileInfo, ...]]:
        """Return what the script saved, as groups of files; each group becomes one snapshot.

        The check ``names`` reads each snapshot by itself. With checkpoints each of them is a group,
        and each other saved path is one. Without a checkpoint all files are one group, because a
        script may save its model in parts.
        """
        # The script may have deleted what it saved.
        existing = []
        for saved in self.saved():
            if Path(saved.path).exists():
                existing.append(saved)
        paths = [saved.path for saved in existing]
        output = ""
        if self.output is not None and self.output.exists():
            output = str(self.output.resolve())
            paths.append(output)
        files_by_path = self._read_files(paths)
        checkpoints: list[tuple[FileInfo, ...]] = []
        others: list[tuple[FileInfo, ...]] = []
        for saved in existing:
            if saved.everyone:
                checkpoints.append(files_by_path[saved.path])
            else:
                others.append(files_by_path[saved.path])
        if checkpoints:
            return [*checkpoints, *others]
        if output and not _holds_model(others):
            # The probe does not see all writing: ``safetensors.torch.save`` gives bytes, and a file
            # may get its name later.
            others.append(files_by_path[output])
        # A script that saved no model, and need not, has nothing whose names could be wrong.
        if not self._should_save and not _holds_model(others):
            return []
        return [tuple(itertools.chain.from_iterable(others))]

    def _read_files(self, paths: Iterable[str]) -> dict[str, tuple[FileInfo, ...]]:
        """Return what the files at or below each path hold, with unwrapped names, by the path."""
        unique_paths = list(dict.fromkeys(paths))
        if not unique_paths:
            return {}
        answer = self._read({"kind": "files", "paths": unique_paths})["files"]
        files_by_path: dict[str, tuple[FileInfo, ...]] = {}
        for path in unique_paths:
            infos = [decode(FileInfo, info) for info in answer[path]]
            files_by_path[path] = tuple(info.renamed(self.saved_name) for info in infos)
        return files_by_path

    @property
    def _should_save(self) -> bool:
        """Tell whether the run has called a function that saves a model, or should leave one."""
        if self.output is not None:
            return True
        return any(saved.model for saved in self.saved())


def _holds_model(groups: Iterable[Iterable[FileInfo]]) -> bool:
    """Tell whether any file in these groups holds tensors of a model, not of an optimizer, say."""
    for files in groups:
        if any(info.holds == "model" for info in files):
            return True
    return False
